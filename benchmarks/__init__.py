"""Figures with the commands that made them: ``python -m benchmarks.codec`` and so on, each described in ``docs/performance.md``."""
