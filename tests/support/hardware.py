"""Without a GPU the kernels run in Triton's interpreter, which must be asked for before they are defined."""

import os
import types

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where the tests have their tensors

if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(1)  # several test processes share the cores
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")

from triton.runtime import interpreter  # noqa: E402


def _round_like_a_gpu(convert):
    """The interpreter cuts fp32 off to bf16; every GPU rounds to nearest even."""
    import numpy as np
    import triton.language as tl

    def call(data, source, target, rounding_mode):
        if (source, target) == (tl.float32, tl.bfloat16):
            values = torch.from_numpy(np.ascontiguousarray(data.view(np.float32)))
            return values.to(torch.bfloat16).view(torch.uint16).numpy().reshape(data.shape)
        if (source, target) == (tl.bfloat16, tl.float32):
            return (data.view(np.uint16).astype(np.uint32) << 16).reshape(data.shape)
        return convert(data, source, target, rounding_mode)

    return call


interpreter._convert_float = _round_like_a_gpu(interpreter._convert_float)


def _prepare_once(prepare):
    """The interpreter replaces what triton.language has anew for every function that a kernel calls, which takes longer
    than the function. Once is enough, of each of the modules' names that a function knows, until the kernel ends.
    """
    known, ready = {}, set()

    def call(fn):
        if fn not in known:
            modules = [value for value in fn.__globals__.values() if isinstance(value, types.ModuleType)]
            known[fn] = frozenset(m.__name__ for m in modules if m.__name__.startswith("triton.language"))
        if known[fn] in ready:
            return interpreter._LangPatchScope()
        ready.add(known[fn])
        scope = prepare(fn)
        restore = scope.restore
        scope.restore = lambda: (ready.clear(), restore())
        return scope

    return call


if hasattr(interpreter, "_LangPatchScope"):
    interpreter._patch_lang = _prepare_once(interpreter._patch_lang)


def _one_number(patch):
    """Before 3.7 the interpreter takes an array of one number for a number, as NumPy has not done since 2.5."""

    def call(tensor, *scope):
        patch(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    return call


interpreter._patch_lang_tensor = _one_number(interpreter._patch_lang_tensor)
