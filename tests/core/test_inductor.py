"""Inductor writes over what a backward has saved, and keeps the code: not for a backward that is
run again."""

import os
import shutil
import subprocess
import sys

import pytest
from hardware import DEVICE

pytestmark = [
    pytest.mark.skipif(
        DEVICE == "cpu" and shutil.which("g++") is None, reason="no C++ compiler for Inductor"
    ),
    pytest.mark.thorough,
]

OF_TWO_PRODUCTS = """
import sys

import torch
from torch._dynamo.utils import counters

if "ours" in sys.argv:
    from liger_kernel.core.op import custom_op
else:
    custom_op = lambda name, like: lambda fn: fn  # PyTorch alone

@custom_op("product_of_a_test", torch.empty_like)
def product(x: torch.Tensor) -> torch.Tensor:
    return x.mm(x)

class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = product(x)
        ctx.save_for_backward(y)
        return y.sum()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0]

def gradients(times):
    torch._dynamo.reset()
    x = torch.full((64, 64), 0.5, device=sys.argv[1], requires_grad=True)
    loss = torch.compile(Product.apply)(x) * 3
    found = [torch.autograd.grad(loss, x, retain_graph=times > 1)[0][0, 0].item() for _ in range(times)]
    return [d / 48 for d in found]

for times in map(int, sys.argv[2].split(",")):
    print(*gradients(times))
print(sum(counters["inductor"][k] for k in ("fxgraph_cache_hit", "fxgraph_cache_miss")), file=sys.stderr)
"""


def run(times, directory, whose="ours"):
    """-> the gradients, each as a multiple of what it has to be."""
    environment = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(directory))
    command = [sys.executable, "-c", OF_TWO_PRODUCTS, DEVICE, times, whose]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert int(done.stderr.split()[-1])  # the cache was on
    return [[float(x) for x in line.split()] for line in done.stdout.splitlines()]


def test_a_second_backward_with_the_code_of_a_single_one(tmp_path):
    """From another process, and from this one: with PyTorch alone (up to 2.13) the second gradient
    is multiplied twice.

    Without ``whose="ours"`` the same program shows it.
    """
    assert run("1,2", tmp_path) == [[1], [1, 1]]
    assert run("2", tmp_path) == [[1, 1]]


def test_a_single_backward_with_the_code_of_two(tmp_path):
    assert run("2,1", tmp_path) == [[1, 1], [1]]
