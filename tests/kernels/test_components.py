"""Every op against numbers of an implementation that is not ours (tests/data/components.md)."""

from pathlib import Path

import pytest
import torch

from deepinfer import kernels
from deepinfer.kernels import Layout, Records
from support import oracle
from support.kernel_laws import implementations

DATA = Path(__file__).parent.parent / "data" / "components.xz"


@pytest.fixture(scope="module")
def numbers():
    return oracle.unpack(DATA.read_bytes())


def each(op):
    """Parametrise a test with every implementation of an op, as a function that skips the test
    when the implementation refuses the call."""
    found = implementations(lambda i: i.op == op)

    def run(implementation):
        def call(*args, **kwargs):
            why = implementation.why_refused(*args, **kwargs)
            return implementation.fn(*args, **kwargs) if why is None else pytest.skip(why)

        return call

    known = kernels.get(op).implementations
    return pytest.mark.parametrize("run", [pytest.param(run(known[n]), id=n) for _, n in found])


def near(got, want, tolerance=2e-6):
    assert got.shape == want.shape
    assert (got - want).abs().max() <= tolerance


@each("rms_norm")
def test_rms_norm(run, numbers):
    near(run(numbers["norm/x"], numbers["norm/weight"], 1e-20), numbers["norm/out"])


@pytest.mark.parametrize("kind", ["rope", "rope_yarn"])
@each("rope")
def test_rope(run, numbers, kind):
    x, angles = numbers[f"{kind}/x"], numbers[f"{kind}/angles"]
    near(run(x, angles.cos(), angles.sin()), numbers[f"{kind}/out"])
    near(run(x, angles.cos(), angles.sin(), inverse=True), numbers[f"{kind}/inverse"])


@each("mhc_mix")
def test_mhc_mix(run, numbers):
    n = {k.removeprefix("mhc/"): v for k, v in numbers.items() if k.startswith("mhc/")}
    pre, post, comb = run(
        n["x"], n["fn"], n["base"], n["scale"], iters=20, norm_eps=1e-20, hc_eps=1e-6
    )
    near(pre, n["pre"])
    near(post, n["post"])
    near(comb, n["comb"])
    # Row sums are off by far more than column sums: the last step is a column step.
    assert (comb.sum(1) - 1).abs().max() < 1e-5


@each("mhc_collapse")
def test_mhc_collapse(run, numbers):
    near(run(numbers["mhc/x"], numbers["mhc/pre"]), numbers["mhc/collapsed"])


@each("mhc_expand")
def test_mhc_expand(run, numbers):
    out = run(numbers["mhc/x"], numbers["mhc/sub"], numbers["mhc/post"], numbers["mhc/comb"])
    near(out, numbers["mhc/expanded"])


@pytest.mark.parametrize(
    ("format", "name"), [("mxfp8", "fp8_32"), ("mxfp4", "mxfp4_32"), ("nvfp4", "nvfp4_16")]
)
@each("cache_round")
def test_cache_round_bit_for_bit(run, numbers, format, name):
    x = numbers["quant/x"]
    assert torch.equal(run(x, format), numbers[f"quant/{name}"])
    assert torch.equal(run(x.bfloat16(), format), numbers[f"quant/{name}_bf16"])
    assert torch.equal(run(x.double(), format).float(), numbers[f"quant/{name}"])


@each("compress")
def test_compress(run, numbers):
    x = numbers["compressor/x"][:300]
    values, gates = (
        (x @ numbers[f"compressor/2/{w}"].T).unflatten(0, (-1, 2)) for w in ("wkv", "wgate")
    )
    out = run(values, gates, numbers["compressor/2/norm"], 1e-20, torch.float32)
    near(out, numbers["compressor/2/out"])


@pytest.mark.parametrize("image", [False, True])
@each("route")
def test_route(run, numbers, image):
    name = "router_image" if image else "router"
    x, scale = numbers["router/x"], numbers["router/routed_scaling_factor"].item()
    rows = torch.full((len(x),), image) if image else None
    bias, bias_image = numbers["router/bias"], numbers["router/bias_vl"]
    ids, weights = run(x, numbers["router/weight"], bias, bias_image, rows, 4, scale)
    assert torch.equal(ids, numbers[f"{name}/indices"].long())
    near(weights, numbers[f"{name}/weights"])


@each("swiglu")
def test_swiglu(run, numbers):
    limit = numbers["swiglu/limit"].item()
    near(run(numbers["swiglu/gate"], numbers["swiglu/up"], limit), numbers["swiglu/out"])


@pytest.mark.parametrize("history", [0, 90])
@each("sparse_attend")
def test_sliding_window_with_sink(run, numbers, history):
    """Keys of the window in storage, or the newer ones as the step's own rows."""
    kv, window = numbers["swa/kv"], 128
    stored = torch.cat([torch.zeros(1, 64), kv[:history]])
    position = torch.arange(len(kv)).unsqueeze(1) - torch.arange(window - 1, -1, -1)
    ids = torch.where(position >= 0, position + 1, -1)
    records = Records(stored, kv[history:], Layout("float", 64))
    out = run(numbers["swa/q"], records, ids, None, None, numbers["swa/sink"], 64**-0.5)
    near(out, numbers["swa/out"])


@each("candidate_blocks")
def test_candidate_blocks(run, numbers):
    scores, keep = numbers["candidates/scores"], numbers["candidates/keep"]
    t, n = scores.shape
    blocks = run(scores, torch.arange(1, t + 1), 8, 4)
    kept = (blocks.unsqueeze(2) == torch.arange(-(-n // 8))).any(1)
    visible = torch.isfinite(scores)
    assert torch.equal(kept.repeat_interleave(8, 1)[:, :n] & visible, keep & visible)


@each("engram_hash")
def test_engram_hash(run, numbers):
    e = {k.removeprefix("engram/"): v for k, v in numbers.items() if k.startswith("engram/")}
    for layer in range(2):
        rows = run(e["tokens"], e["multipliers"][layer], e["primes"][layer], e["offsets"][layer])
        assert torch.equal(rows, e["hash"][:, layer])


@each("engram_gate")
def test_engram_gate(run, numbers):
    e = {k.removeprefix("engram/"): v for k, v in numbers.items() if k.startswith("engram/")}
    key, value = e["kv"][:, :512].view(64, 4, 128), e["kv"][:, 512:]
    arguments = (e["x"], key, value, e["q_weight"], e["k_weight"], 1e-20)
    near(run(*arguments, None), e["out"])
    near(run(*arguments, ~e["mask"]), e["out_masked"])
    assert torch.equal(run(*arguments, ~e["mask"])[~e["mask"]], e["x"][~e["mask"]])
