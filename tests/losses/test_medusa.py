"""`liger_medusa_loss`: beside plain logits in fp64, labels shifted by hand, what is in memory,
frozen parts, graphs.

Under DDP and FSDP: `medusa_ranks`, in the processes of tests/patch/test_layouts.py.
"""

import gc
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from cases import WITH_AND_WITHOUT_KERNELS, assert_as_exact_as_pytorch, cast, run, tensors_with_grad
from hardware import DEVICE
from heads import B16, F16, F32, F64, assert_outputs_close, measure_head_errors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from liger_kernel.chunked_loss import liger_medusa_loss
from liger_kernel.losses import medusa
from liger_kernel.ops.head import planning

B, T, H, V = 2, 6, 24, 77
COEFFICIENTS = [0.8, 0.0, 0.5]


def draw_tensors(N=3, seed=0, shared=False, bias=True, T=T):
    """Named tensors of N heads, or of one that all heads share; some labels are ignored."""
    torch.manual_seed(seed)
    tensors, N = dict(labels=torch.randint(V, (B, T))), 1 if shared else N
    tensors["labels"][0, : T // 2] = -100
    for k in range(N):
        tensors[f"hidden{k}"] = torch.randn(B, T, H)
        tensors["weight" if k == 0 else f"weight{k}"] = (
            torch.randn(V, H) * 2 / H**0.5
        )  # `measure_head_errors` asks for "weight"
        if bias:
            tensors[f"bias{k}"] = torch.randn(V)
    return {k: t.requires_grad_(t.is_floating_point()) for k, t in tensors.items()}


def parts(tensors):
    """Return hidden states, weights, biases, labels."""
    of = [
        [t for k, t in tensors.items() if k.startswith(name)]
        for name in ("hidden", "weight", "bias")
    ]
    return *of, tensors["labels"]


def rows(name):
    """Return True if a tensor of that name has a row for each sequence."""
    return name == "labels" or name.startswith("hidden")


def ours(coefficients=COEFFICIENTS, **option):
    def call(**tensors):
        h, w, b, labels = (
            x[0] if isinstance(x, list) and len(x) == 1 else x for x in parts(tensors)
        )
        return liger_medusa_loss(
            h, w, labels, b if len(b) else None, coefficients=coefficients, **option
        )

    return call


def plain(
    coefficients=COEFFICIENTS,
    first=1,
    num_items=None,
    softcap=None,
    logit_scale=1.0,
    label_smoothing=0.0,
):
    """As Medusa's script has it: logits of all tokens but the last ones, labels of all but the
    first ones."""

    def call(**tensors):
        *of, labels = parts(tensors)
        losses = []
        for k in range(len(coefficients)):
            h, w, b = (x[k if len(x) > 1 else 0] if x else None for x in of)
            n = max(labels.shape[1] - (shift := first + k + 1), 0)
            z = F.linear(h.flatten(0, 1), w, b).view(*labels.shape, -1)[:, :n]
            z = z.to(torch.promote_types(z.dtype, F32)) * logit_scale
            z = softcap * torch.tanh(z / softcap) if softcap else z
            target = labels[:, shift:].flatten()
            total = F.cross_entropy(
                z.flatten(0, 1), target, reduction="sum", label_smoothing=label_smoothing
            )
            losses.append(
                total / ((target != -100).sum().clamp(min=1) if num_items is None else num_items)
            )
        return sum(c * loss for c, loss in zip(coefficients, losses, strict=True)), torch.stack(
            losses
        ).detach()

    return call


# ---- values and gradients ----

OPTIONS = {
    "plain": {},
    "with the model's own": dict(first=0, coefficients=[1.0, 0.3, 0.1]),
    "options": dict(softcap=5.0, logit_scale=0.5, label_smoothing=0.1),
}
DRAWS = (
    ("with the model's own", True, F32),
    ("options", False, F16),
    ("plain", True, B16),
    ("plain", False, F32),
    ("plain", False, B16),
    ("plain", True, F16),
    ("with the model's own", False, F16),
    ("options", True, F32),
)


@pytest.mark.parametrize("option, shared, dtype", DRAWS, ids=str)
def test_as_exact_as_pytorch(option, shared, dtype):
    """Every gradient; a second backward; inputs are not written to (`measure_head_errors`).

    One head has coefficient 0.
    """
    draws = []
    for seed in range(2):
        tensors = draw_tensors(seed=seed, shared=shared, bias=option != "plain")
        draws.append(
            measure_head_errors(ours(**OPTIONS[option]), plain(**OPTIONS[option]), tensors, dtype)
        )
    assert_as_exact_as_pytorch(draws)


@WITH_AND_WITHOUT_KERNELS
@pytest.mark.parametrize("shared", [False, True], ids=["each its own", "shared"])
def test_with_kernels_and_without(shared):
    tensors = cast(draw_tensors(shared=shared), F32)
    expected = run(plain(), cast(tensors, F64))[0]
    actual = run(ours(), tensors)[0]
    assert_outputs_close(actual, expected)
    if not shared:
        assert (
            not actual["dweight1"].any() and actual["dweight2"].any()
        )  # the head of coefficient 0


def test_labels_by_hand():
    """Four heads of sequences of four tokens. What each token of each head should say is written
    out."""
    x = -100
    labels = torch.tensor([[1, 2, 3, 4], [5, x, 7, 8]])
    targets = {1: [3, 4, x, x, 7, 8, x, x], 2: [4, x, x, x, 8, x, x, x], 3: [x] * 8, 4: [x] * 8}
    tensors = cast(draw_tensors(4, T=4) | dict(labels=labels), F32)
    h, w, b, labels = parts(tensors)
    loss, losses, accuracies = liger_medusa_loss(h, w, labels, b, return_token_accuracy=True)
    expected = []
    for k, target in targets.items():
        z = F.linear(*(x[k - 1].double() for x in (h, w, b))).flatten(0, 1)
        target = torch.tensor(target, device=DEVICE)
        n = (target != x).sum()
        expected.append(F.cross_entropy(z, target, reduction="sum") / n.clamp(min=1))
        right = ((z.argmax(-1) == target) & (target != x)).sum() / n
        torch.testing.assert_close(accuracies[k - 1], right.float(), equal_nan=True)
    expected = torch.stack(expected)
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=0)
    torch.testing.assert_close(
        loss.double(), (expected * expected.new_tensor([0.8, 0.64, 0.512, 0.4096])).sum()
    )
    grads = torch.autograd.grad(loss, [*h, *w, *b])
    assert all(g.isfinite().all() for g in grads)
    assert [bool(g.any()) for g in grads] == [True, True, False, False] * 3


@WITH_AND_WITHOUT_KERNELS
@pytest.mark.parametrize("form", ["tensor", "list", "number"])
def test_gradient_accumulation(form):
    """Micro-batches whose sums are divided by the same numbers make up the batch."""
    tensors = cast(draw_tensors(), F32)
    counts = [int((tensors["labels"][:, k + 1 :] != -100).sum()) for k in (1, 2, 3)]
    given = {"number": 7, "tensor": torch.tensor(7), "list": counts}[form]
    expected = run(plain(num_items=None if form == "list" else 7), cast(tensors, F64))[0]

    def of_row(i):
        def call(**tensors):
            return ours(num_items_in_batch=given)(
                **{k: t[i : i + 1] if rows(k) else t for k, t in tensors.items()}
            )

        return run(call, tensors)[0]

    one, two = of_row(0), of_row(1)
    assert_outputs_close({k: x + two[k] for k, x in one.items()}, expected)


def test_packed_sequences():
    """Two texts in one row, as two rows of which the shorter one is padded."""
    tensors = cast(draw_tensors(T=5), F32)
    tensors["labels"][1, 3:] = -100

    def packed(**option):
        return lambda **tensors: ours(**option)(
            **{k: t.flatten(0, 1)[None, :8] if rows(k) else t for k, t in tensors.items()}
        )

    expected = run(ours(), tensors)[0]
    assert_outputs_close(
        run(packed(position_ids=torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]], device=DEVICE)), tensors)[
            0
        ],
        expected,
    )
    assert not torch.allclose(
        packed()(**tensors)[0], expected["output 0"]
    )  # without them, across the border


@WITH_AND_WITHOUT_KERNELS
@pytest.mark.thorough
def test_what_no_label_needs_is_dropped():
    tensors = cast(draw_tensors(), F32)
    actual, expected = (run(ours(drop_ignored=drop), tensors)[0] for drop in (True, False))
    assert_outputs_close(actual, expected)
    nothing = dict(labels=torch.full_like(tensors["labels"], -100))
    for drop, dtype in (True, F32), (False, F32), (False, F16):
        assert not any(
            x.any()
            for x in run(ours(drop_ignored=drop), cast(tensors, dtype) | nothing)[0].values()
        )


# ---- what learns ----


@WITH_AND_WITHOUT_KERNELS
@pytest.mark.parametrize("learns", ["hidden", "weight", "bias", ""])
def test_frozen_parts(learns):
    tensors = cast(draw_tensors(), F32)
    expected = run(plain(), cast(tensors, F64))[0]
    for k, t in tensors.items():
        t.requires_grad_(bool(learns) and k.startswith(learns))
    if not learns:
        loss, _ = ours()(**tensors)
        assert not loss.requires_grad
        return torch.testing.assert_close(loss.double(), expected["output 0"], rtol=1e-5, atol=0)
    actual = run(ours(), tensors)[0]
    assert {k for k in actual if k.startswith("d")} == {
        f"d{k}" for k in tensors if k.startswith(learns)
    }
    assert_outputs_close(actual, {k: expected[k] for k in actual})


@pytest.mark.thorough
def test_a_frozen_backbone_and_its_heads():
    """The heads learn, with their residual blocks; the backbone has no gradient."""
    torch.manual_seed(0)
    backbone = torch.nn.Embedding(V, H, device=DEVICE).requires_grad_(False)
    blocks, heads = (
        torch.nn.ModuleList(torch.nn.Linear(H, n, device=DEVICE) for _ in range(2)) for n in (H, V)
    )
    optimizer = torch.optim.SGD([*blocks.parameters(), *heads.parameters()], lr=0.5)
    ids, losses = torch.randint(V, (B, T), device=DEVICE), []
    for _ in range(4):
        h = backbone(ids)
        states = (h + F.silu(block(h)) for block in blocks)
        loss, _ = liger_medusa_loss(states, [p.weight for p in heads], ids, [p.bias for p in heads])
        loss.backward()
        assert backbone.weight.grad is None and all(
            p.grad.any() for p in [*blocks.parameters(), *heads.parameters()]
        )
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.5


@pytest.mark.thorough
def test_autocast():
    """As with everything in bf16; the gradients are in the parameters' fp32, so without that last
    rounding."""
    tensors = cast(draw_tensors(), F32)
    with torch.autocast(DEVICE, B16):
        loss, _ = ours()(**tensors)
    low = cast(draw_tensors(), B16)
    expected, _ = ours()(**low)
    assert loss.dtype == F32 and torch.equal(loss, expected)
    loss.backward()
    expected.backward()
    for k, t in tensors_with_grad(tensors).items():
        d = low[k].grad.float()
        assert t.grad.dtype == F32
        assert (t.grad - d).abs().max() <= torch.finfo(B16).eps * d.abs().max(), k


@pytest.mark.parametrize("layers", [None, [torch.nn.Identity()] * 2])
@pytest.mark.parametrize("dtypes", [(F16, F16), (F16, F32), (F32, F16)], ids=str)
def test_small_gradients_of_fp16_hidden_states(dtypes, layers):
    """fp16 can't hold them before a scaler's factor, also where the logits are in fp32.

    Heads whose hidden states have other dtypes add up their gradients of one weight."""
    torch.manual_seed(0)
    hidden = [torch.randn(B, T, H).to(DEVICE, dtype).requires_grad_() for dtype in dtypes]
    w = (torch.randn(V, H) * 2 / H**0.5).to(DEVICE).requires_grad_()
    labels = torch.randint(V, (B, T), device=DEVICE)
    num_items = 2**23
    scaler = 2.0**20
    loss, _ = liger_medusa_loss(
        hidden,
        w,
        labels,
        coefficients=[1.0, 1.0],
        num_items_in_batch=num_items,
        layers=layers,
    )
    *dhidden, dw = torch.autograd.grad(loss * scaler, [*hidden, w])
    fp32 = 128 * 2.0**-24  # the roundings of sums of up to 77 terms
    exact_dw = dw_terms = 0
    for shift, h, dh in zip((2, 3), hidden, dhidden, strict=True):
        h = h.detach().double()
        dlogits = (h @ w.double().T).softmax(-1)
        dlogits[:, :-shift] -= F.one_hot(labels[:, shift:], V)
        dlogits[:, -shift:] = 0
        dlogits *= scaler / num_items
        exact = dlogits @ w.double()
        bound = fp32 * (dlogits.abs() @ w.double().abs())
        if dh.dtype == F16:  # rounded before and after the factor
            bound += 2 * 2.0**-11 * exact.abs() + 2.0**-24
        assert ((dh.double() - exact).abs() <= bound).all()
        exact_dw += torch.einsum("btv,bth->vh", dlogits, h)
        dw_terms += torch.einsum("btv,bth->vh", dlogits.abs(), h.abs())
    assert ((dw.double() - exact_dw).abs() <= fp32 * dw_terms).all()


@pytest.mark.thorough
def test_a_graph_of_the_gradients():
    tensors = cast(draw_tensors(shared=True), F32)

    def second(fn, tensors):
        of = [*tensors_with_grad(tensors).values()]
        first = torch.autograd.grad(fn(**tensors)[0], of, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), of)

    for a, b in zip(second(ours(), tensors), second(plain(), cast(tensors, F64)), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5 * b.abs().max().item())


# ---- memory ----


@pytest.mark.parametrize(
    "need_w",
    [True, pytest.param(False, marks=pytest.mark.thorough)],
    ids=["all", "frozen projections"],
)
def test_no_logits_in_memory(need_w, monkeypatch):
    """No tensor is larger than a head's budget and a gradient, which is less than its logits."""
    for name, value in dict(CHUNK_TOKENS=64, MIN_CHUNK_TOKENS=64, FREE_BYTES=0).items():
        monkeypatch.setattr(planning, name, value)
    length, largest = 150, []
    memory = 100 * V * 4

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            largest.extend(
                x.untyped_storage().nbytes()
                for x in tree_leaves(out)
                if isinstance(x, torch.Tensor)
            )
            return out

    tensors = cast(draw_tensors(T=length), F32)
    for k, t in tensors.items():
        t.requires_grad_(t.requires_grad and (need_w or not k.startswith("weight")))
    with Largest():
        ours(memory=memory)(**tensors)[0].backward()
    assert max(largest) <= memory + V * H * 4 * need_w < B * length * V * 4
    largest.clear()
    with Largest():
        plain()(**tensors)
    assert max(largest) >= B * length * V * 4


def test_gradients_add_up_in_place(monkeypatch):
    """Tensors that heads share have one gradient: when a head begins, the others' are gone."""
    made, alive = [], []
    fused = medusa.fused_linear_cross_entropy_forward

    def noting(*args, **kwargs):
        gc.collect()  # Triton's interpreter leaves its arguments in reference cycles
        alive.append(sum(ref() is not None for ref in made))
        outputs, grads, more = fused(*args, **kwargs)
        made.extend(map(weakref.ref, grads))
        return outputs, grads, more

    monkeypatch.setattr(medusa, "fused_linear_cross_entropy_forward", noting)
    tensors = cast(draw_tensors(shared=True), F32)
    loss, _ = ours([0.8, 0.7, 0.6])(**tensors)
    assert alive == [0, 3, 3] and len(made) == 9
    loss.backward()
    assert all(t.grad.any() for t in tensors_with_grad(tensors).values())


# ---- torch.compile ----


@pytest.mark.thorough
def test_compiled_steps():
    """A whole step, and further ones in which the heads' share grows; without gradients, too."""
    tensors = cast(draw_tensors(2), F32)
    compiled = torch.compile(
        lambda share, **tensors: ours([share * c for c in (0.8, 0.64)])(**tensors),
        fullgraph=True,
        backend="aot_eager",
    )
    for share in (0.1, 0.2):
        expected = run(ours([share * c for c in (0.8, 0.64)], drop_ignored=False), tensors)[0]
        assert_outputs_close(run(partial(compiled, share), tensors)[0], expected)
    with torch.no_grad():
        torch.testing.assert_close(compiled(0.2, **tensors)[0], expected["output 0"])


# ---- errors ----

x = torch.randn(B, T, H)
w = torch.randn(V, H)
y = torch.randint(V, (B, T))
WRONG = {
    "how many heads": ((x, w, y), {}, "no list of anything; give one for each head"),
    "counts": (
        (x, [w, w], y),
        dict(coefficients=[1.0]),
        "2 weights, 1 coefficients; give one for each head",
    ),
    "no head": ((x, [], y), {}, "0 weights; give one for each head"),
    "stacked": (
        (x, torch.randn(2, V, H), y),
        dict(coefficients=[1, 1]),
        "give .classes, hidden size. for each head",
    ),
    "labels": (
        (x, [w], y[:, 1:]),
        {},
        r"hidden states have shape \(2, 6, 24\) and labels \(2, 5\)",
    ),
    "bias": (
        (x, [w], y, [torch.randn(V + 1)]),
        {},
        r"head 1: bias has shape \(78,\), give one number a class",
    ),
    "widths": (
        (x, [w[:, 1:]], y),
        {},
        r"head 1: the hidden states have shape \(12, 24\) and the weight \(77, 23\)",
    ),
    "label": ((x, [w], y + V), {}, "head 1: the target of row 0 is .* give a class from 0 to 76"),
    "positions": (
        (x, [w], y),
        dict(position_ids=y[:, 1:]),
        r"position_ids has shape \(2, 5\), give that of labels",
    ),
    "items": (
        (x, [w] * 3, y),
        dict(num_items_in_batch=[1, 2]),
        "num_items_in_batch has 2 numbers, give one, or one",
    ),
    "item": (
        (x, [w] * 3, y),
        dict(num_items_in_batch=torch.ones(2)),
        "num_items_in_batch is .* of shape .2,.",
    ),
    "negative": (
        (x, [w], y),
        dict(coefficients=[-1]),
        "a coefficient is -1, give a number from 0 on",
    ),
    "first": ((x, [w], y), dict(first=-1), "first is -1, give an int from 0 on"),
    "dtypes": (
        (x, [w, w.half()], y),
        {},
        r"weights are torch.float32 and torch.float16 \(head 2\), give one dtype",
    ),
    "coefficients": (
        (x, [w], y),
        dict(coefficients=torch.ones(1)),
        "coefficients is a tensor, give a list",
    ),
    "no tensor": ((x, [3], y), {}, "weights is a int, give a tensor"),
    "float labels": ((x, [w], y.float()), {}, "labels is torch.float32, give integers"),
    "scalar": ((x, 3, y), {}, "weights is a int, give a tensor or one for each head"),
}


@pytest.mark.parametrize("case", WRONG)
def test_errors(case):
    args, options, match = WRONG[case]

    def on_device(t):
        return t.to(DEVICE) if isinstance(t, torch.Tensor) and t.is_floating_point() else t

    args = [[on_device(t) for t in a] if isinstance(a, list) else on_device(a) for a in args]
    with pytest.raises((ValueError, TypeError), match=f"^liger_medusa_loss.*{match}"):
        liger_medusa_loss(*args, **options)
