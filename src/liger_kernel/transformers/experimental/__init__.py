"""What the published package calls experimental, handed on."""

from liger_kernel.ops.embedding.embedding import LigerEmbedding

__all__ = ["LigerEmbedding"]
