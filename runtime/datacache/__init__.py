"""DataCache: samples from slow storage once, then from the local disk and from memory (CommLib's DataCache)."""

from __future__ import annotations

from runtime.datacache.dataset import CachedDataset, CacheStats
from runtime.datacache.sampler import CachedSampler
from runtime.datacache.source import RawDataset

__all__ = ["CacheStats", "CachedDataset", "CachedSampler", "RawDataset"]
