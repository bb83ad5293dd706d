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
from liger_kernel.ops import functional as operators
from liger_kernel.ops.configure import FusedLinearCrossEntropyConfig, MoEConfig, configure
from liger_kernel.ops.utils import device_context

V, H = 24, 16


def draw(*shape):
    return torch.randn(*shape, device=DEVICE)


def arguments():
    """Return (arguments, the operator that takes the same) of each function by name."""
    torch.manual_seed(0)
    x = draw(6, H)
    w = draw(H)
    head = draw(V, H)
    q = draw(2, 3, 5, 8)
    k = draw(2, 1, 5, 8)
    angles = draw(1, 5, 8)
    labels = torch.arange(6, device=DEVICE)
    logits = draw(6, V)
    log_q = logits.log_softmax(-1)
    log_p = draw(6, V).log_softmax(-1)
    return {
        "rms_norm": ((x, w), operators.liger_rms_norm),
        "layer_norm": ((x, w, w), operators.liger_layer_norm),
        "fused_add_rms_norm": ((x, x, w), operators.liger_fused_add_rms_norm),
        "softmax": ((logits,), operators.liger_softmax),
        "swiglu": ((x, x, 0.5, 2.0), operators.liger_swiglu),
        "geglu": ((x, x), operators.liger_geglu),
        "rope": ((q, k, angles.cos(), angles.sin()), operators.liger_rope),
        "kl_div": (
            (log_q, log_p.exp()),
            lambda y, t: operators.liger_kl_div(y, t, reduction="batchmean"),
        ),
        "jsd": ((log_q, log_p, labels, 0.3), operators.liger_jsd),
        "fused_linear_jsd": ((x, head, x, 2 * head, labels, 0.3), operators.liger_fused_linear_jsd),
        "cross_entropy": ((logits, labels), operators.liger_cross_entropy),
        "fused_linear_cross_entropy": (
            (x, head, labels),
            operators.liger_fused_linear_cross_entropy,
        ),
    }


@pytest.mark.parametrize("name", OPERATOR_NAMES)
def test_is_the_operator(name):
    args, operator = arguments()[name]
    function = getattr(functional, name)
    output = function(*args)
    if "cross_entropy" in name:
        assert output[1:] == (None, None, None)
        output = output[0]
    torch.testing.assert_close(output, operator(*args), rtol=0, atol=0)
    torch.testing.assert_close(
        function(*args, impl="triton"), function(*args, backend="nvidia-triton")
    )
    torch.testing.assert_close(
        function(*args, impl="nvidia-triton", backend="triton"), function(*args)
    )
    for wrong in (dict(impl="cutile"), dict(impl="triton", backend="cutile")):
        with pytest.raises(ValueError, match=name):
            function(*args, **wrong)
    parameters = inspect.signature(function).parameters
    for keyword in ("impl", "mode", "backend"):
        assert parameters[keyword].kind is inspect.Parameter.KEYWORD_ONLY


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
    assert liger_kernel.available_impls("rms_norm") == ["triton"]
    assert liger_kernel.available_backends("rope", DEVICE) == ["triton"]
    assert liger_kernel.available_impls("no such operator") == []


def test_environment(capsys):
    env_report.print_env_report()
    report = f"liger-kernel: {liger_kernel.__version__}\nPyTorch: {torch.__version__}"
    assert report in capsys.readouterr().out
    assert (utils.infer_device_arch() == "cpu") == (DEVICE == "cpu")
    with device_context(draw(1)), device_context("cpu"):
        pass


def test_by_transformers_version():
    def before(*args, **kwargs):
        return "before"

    def after(*args, **kwargs):
        return args, kwargs

    dispatch = utils.transformers_version_dispatch
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
    moe = MoEConfig(8, H, num_experts=4, top_k=2, num_hosts=1, gpus_per_host=1)
    assert configure(moe=moe) is False


def test_cache_of_kernels(tmp_path, monkeypatch):
    """A reader finds a whole file while other threads write, and no other file is left behind."""
    pytest.importorskip("triton")
    from liger_kernel.triton import apply_liger_triton_cache_manager
    from liger_kernel.triton.monkey_patch import LigerTritonFileCacheManager

    monkeypatch.setenv("TRITON_CACHE_MANAGER", "")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    apply_liger_triton_cache_manager()
    module, _, name = os.environ["TRITON_CACHE_MANAGER"].partition(":")
    assert name == LigerTritonFileCacheManager.__name__
    assert module == LigerTritonFileCacheManager.__module__
    text = "x" * 100_000
    wrong = []

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
