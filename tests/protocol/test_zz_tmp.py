from tests.protocol.test_processes import *
from tests.conftest import *
import time
def test_x(seaweed, seaweed_url):
    store = open_store(seaweed_url, s3=seaweed.settings)
    t0=time.time()
    run = run_of(store, MANY[:8])
    stop = threading.Event()
    threads = []
    log=[]
    for k in range(2):
        mine = OpenRun(store=open_store(seaweed_url, s3=seaweed.settings), env=Env.system(), record=run.record)
        def on(o,k=k): log.append((round(time.time()-t0,2),k,o.kind,o.head.record.version,o.head.record.tokens, list(o.head.record.units), [e.tries for e in o.head.record.units.values()],o.wake_at_s and o.wake_at_s-time.monotonic()))
        threads.append(threading.Thread(target=serve, args=(mine,), kwargs={"stop": stop, "poll_s": 0.02,"on_outcome":on}, daemon=True))
    for thread in threads:
        thread.start()
    for one in MANY[:8]:
        put_out(run, [one])
    for thread in threads:
        thread.join(60.0)
    print(time.time()-t0)
    last=0
    for l in log:
        if l[2]!="idle" or l[0]-last>0.2 or last==0: print(l)
        last=l[0]
    store.close()
