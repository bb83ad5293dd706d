"""Operators under the published package's experimental path."""

from liger_kernel.ops.embedding.embedding import LigerEmbedding

__all__ = ["LigerEmbedding"]
