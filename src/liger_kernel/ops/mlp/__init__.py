"""The operators of MLPs. The folder's name is also the published path of `LigerMLPFunction`."""

from liger_kernel.ops.mlp.swiglu_mlp import LigerMLPFunction as LigerMLPFunction
