"""Inductor writes over what a backward has saved, and caches that code: not for a backward that
runs again."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from hardware import DEVICE
from torch._guards import TracingContext, tracing
from torch._inductor.codecache import FxGraphHashDetails

from liger_kernel.core import inductor
from liger_kernel.core.op import NAMESPACE, custom_op


@custom_op("square_of_a_test", torch.empty_like)
def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


def graph_module(op):
    graph = torch.fx.Graph()
    graph.output(graph.call_function(op, (graph.placeholder("x"),)))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


class Metadata:
    bw_donated_idxs = [0]


@pytest.fixture
def is_keyed_by_donated_buffers(monkeypatch):
    """A function of a forward's and a backward's operator: for each graph, whether its key has the
    donated buffers."""
    monkeypatch.setattr(FxGraphHashDetails, "__init__", FxGraphHashDetails.__init__)
    inductor.key_backward_by_donated_buffers.__wrapped__(NAMESPACE)

    def is_keyed(forward, backward):
        context = TracingContext(None)
        context.fw_metadata = Metadata()
        with tracing(context):
            details = [
                FxGraphHashDetails(graph_module(op), [], {"is_backward": op is backward}, [])
                for op in (forward, backward)
            ]
        return ["donated_buffers" in vars(d) for d in details]

    return is_keyed


def test_graphs_without_our_operators_keep_their_key(is_keyed_by_donated_buffers):
    assert is_keyed_by_donated_buffers(torch.sin, torch.cos) == [False, False]


def test_only_backward_graphs_of_our_operators_have_another_key(is_keyed_by_donated_buffers):
    """The operator may be in forward or in backward. Other graphs, before and after, are not
    affected."""
    assert is_keyed_by_donated_buffers(square.op, torch.cos) == [False, True]
    assert is_keyed_by_donated_buffers(torch.sin, torch.cos) == [False, False]
    assert is_keyed_by_donated_buffers(torch.sin, square.op) == [False, True]


def test_an_operator_in_a_nested_graph(is_keyed_by_donated_buffers):
    outer = graph_module(torch.sin)
    outer.branch = graph_module(square.op)
    assert inductor._has_operator(outer, NAMESPACE)
    assert not inductor._has_operator(graph_module(torch.sin), NAMESPACE)


# ---- the code that Inductor's cache gives ----

needs_a_compiler = pytest.mark.skipif(
    DEVICE == "cpu" and shutil.which("g++") is None, reason="no C++ compiler for Inductor"
)

TWO_PRODUCTS = """
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
    retain_graph = times > 1
    grads = [torch.autograd.grad(loss, x, retain_graph=retain_graph)[0] for _ in range(times)]
    return [grad[0, 0].item() / 48 for grad in grads]

for times in map(int, sys.argv[2].split(",")):
    print(*gradients(times))
lookups = [counters["inductor"][k] for k in ("fxgraph_cache_hit", "fxgraph_cache_miss")]
print(sum(lookups), file=sys.stderr)
"""


def run(times, directory, operator="ours"):
    """Return the gradients, each as a multiple of the right one."""
    environment = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(directory))
    command = [sys.executable, "-c", TWO_PRODUCTS, DEVICE, times, operator]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert int(done.stderr.split()[-1])  # the cache was on
    return [[float(x) for x in line.split()] for line in done.stdout.splitlines()]


@pytest.mark.thorough
@needs_a_compiler
def test_a_second_backward_with_the_code_of_a_single_one(tmp_path):
    """From another process, and from this one.

    With PyTorch alone (2.11 to 2.15) the second gradient is multiplied twice: the same program
    shows it with another word than "ours".
    """
    assert run("1,2", tmp_path) == [[1], [1, 1]]
    assert run("2", tmp_path) == [[1, 1]]


@pytest.mark.thorough
@needs_a_compiler
def test_a_single_backward_with_the_code_of_two(tmp_path):
    assert run("2,1", tmp_path) == [[1, 1], [1]]
