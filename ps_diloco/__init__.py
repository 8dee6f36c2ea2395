"""ps_diloco: Decoupled DiLoCo over cloud buckets."""

__version__ = "0.1.0.dev0"
