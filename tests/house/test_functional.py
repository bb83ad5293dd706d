"""`liger_kernel.functional`, the choice of an implementation, and the helpers beside them."""

import inspect
import os
import threading

import pytest
import torch
from hardware import DEVICE

import liger_kernel
from liger_kernel import env_report, functional, utils
from liger_kernel.implementations import OPERATOR_NAMES
from liger_kernel.ops import functional as ours
from liger_kernel.ops.configure import FusedLinearCrossEntropyConfig, MoEConfig, configure
from liger_kernel.ops.utils import device_context

V, H = 24, 16


def draw(*shape):
    return torch.randn(*shape, device=DEVICE)


def arguments():
    """Of each function, and the operator that it is, with the same ones."""
    torch.manual_seed(0)
    x, w, head = draw(6, H), draw(H), draw(V, H)
    q, k, angles = draw(2, 3, 5, 8), draw(2, 1, 5, 8), draw(1, 5, 8)
    labels, logits, other = torch.arange(6, device=DEVICE), draw(6, V), draw(6, V)
    log_q, log_p = logits.log_softmax(-1), other.log_softmax(-1)
    return {
        "rms_norm": ((x, w), ours.liger_rms_norm),
        "layer_norm": ((x, w, w), ours.liger_layer_norm),
        "fused_add_rms_norm": ((x, x, w), ours.liger_fused_add_rms_norm),
        "softmax": ((logits,), ours.liger_softmax),
        "swiglu": ((x, x, 0.5, 2.0), ours.liger_swiglu),
        "geglu": ((x, x), ours.liger_geglu),
        "rope": ((q, k, angles.cos(), angles.sin()), ours.liger_rope),
        "kl_div": (
            (log_q, log_p.exp()),
            lambda y, t: ours.liger_kl_div(y, t, reduction="batchmean"),
        ),
        "jsd": ((log_q, log_p, labels, 0.3), ours.liger_jsd),
        "fused_linear_jsd": ((x, head, x, 2 * head, labels, 0.3), ours.liger_fused_linear_jsd),
        "cross_entropy": ((logits, labels), ours.liger_cross_entropy),
        "fused_linear_cross_entropy": ((x, head, labels), ours.liger_fused_linear_cross_entropy),
    }


@pytest.mark.parametrize("name", OPERATOR_NAMES)
def test_is_the_operator(name):
    given, operator = arguments()[name]
    function = getattr(functional, name)
    got, want = function(*given), operator(*given)
    if "cross_entropy" in name:
        assert got[1:] == (None, None, None)
        got = got[0]
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    torch.testing.assert_close(
        function(*given, impl="triton"), function(*given, backend="nvidia-triton")
    )
    torch.testing.assert_close(
        function(*given, impl="nvidia-triton", backend="triton"), function(*given)
    )
    for wrong in (dict(impl="cutile"), dict(impl="triton", backend="cutile")):
        with pytest.raises(ValueError, match=name):
            function(*given, **wrong)
    kinds = inspect.signature(function).parameters
    assert [kinds[key].kind for key in ("impl", "mode", "backend")] == [
        inspect.Parameter.KEYWORD_ONLY
    ] * 3


def test_cross_entropies_have_four_results():
    (logits, labels), _ = arguments()["cross_entropy"]
    loss, z_loss, accuracy, tokens = functional.cross_entropy(
        logits,
        labels,
        lse_square_scale=0.1,
        return_z_loss=True,
        return_token_accuracy=True,
        return_predicted_tokens=True,
    )
    assert 0 < z_loss < loss and 0 <= accuracy <= 1 and torch.equal(tokens, logits.argmax(-1))


@pytest.fixture
def default():
    yield
    liger_kernel.set_impl(None)


def test_the_default(default):
    assert liger_kernel.get_impl() is None is liger_kernel.get_backend()
    liger_kernel.set_backend("nvidia-triton")
    assert liger_kernel.get_impl() == "triton"
    with pytest.raises(ValueError, match="'cutile'"):
        liger_kernel.set_impl("cutile")
    assert liger_kernel.get_impl() == "triton"
    assert (
        liger_kernel.available_impls("rms_norm")
        == liger_kernel.available_backends("rope", DEVICE)
        == ["triton"]
    )
    assert liger_kernel.available_impls("no such operator") == []


def test_environment(capsys):
    env_report.print_env_report()
    assert (
        f"liger-kernel: {liger_kernel.__version__}\nPyTorch: {torch.__version__}"
        in capsys.readouterr().out
    )
    assert (utils.infer_device_arch() == "cpu") == (DEVICE == "cpu")
    with device_context(draw(1)), device_context("cpu"):
        pass


def test_by_transformers_version():
    def told(*args, **kwargs):
        return args, kwargs

    dispatch = utils.transformers_version_dispatch
    before, after = lambda *args, **kwargs: "before", told
    assert dispatch("99.0", before, after) == "before"
    assert dispatch("4.0", before, after, (1,), (2,), {"a": 1}, {"b": 2}) == ((2,), {"b": 2})


def test_configure():
    assert configure() is False
    head = FusedLinearCrossEntropyConfig(
        max_tokens=8, hidden_size=H, local_vocab_size=V, group="tp"
    )
    assert configure(flsce=head, process_groups={"tp": None}) is False
    with pytest.raises(ValueError, match="flsce names the group 'tp'"):
        configure(flsce=head)
    with pytest.raises(TypeError, match="moe is a FusedLinear.*give a MoEConfig"):
        configure(moe=head)
    assert (
        configure(moe=MoEConfig(8, H, num_experts=4, top_k=2, num_hosts=1, gpus_per_host=1))
        is False
    )


def test_cache_of_kernels(tmp_path, monkeypatch):
    """Whoever reads while others write finds a whole file, and nothing else is left behind."""
    pytest.importorskip("triton")
    from liger_kernel.triton import apply_liger_triton_cache_manager
    from liger_kernel.triton.monkey_patch import LigerTritonFileCacheManager

    monkeypatch.setenv("TRITON_CACHE_MANAGER", "")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    apply_liger_triton_cache_manager()
    module, _, name = os.environ["TRITON_CACHE_MANAGER"].partition(":")
    assert (
        name == LigerTritonFileCacheManager.__name__
        and module == LigerTritonFileCacheManager.__module__
    )
    text, wrong = "x" * 100_000, []

    def write():
        for _ in range(20):
            path = LigerTritonFileCacheManager("key").put(text, "kernel.ttir", binary=False)
            if open(path).read() != text:
                wrong.append(path)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    manager = LigerTritonFileCacheManager("key")
    long = "n" * 250  # of the 255 characters that a file system takes
    os.remove(manager.put(text, long))
    assert not wrong and os.listdir(manager.cache_dir) == ["kernel.ttir"]
    assert manager.get_file("kernel.ttir") == manager.put(text.encode(), "kernel.ttir")
