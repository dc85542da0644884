"""Sparse attention against a loop, and what decides where a key is read from."""

import pytest
import torch

from deepinfer import kernels
from deepinfer.kernels import Layout, Records
from support.kernel_laws import implementations

found = implementations(lambda i: i.op == "sparse_attend")
each = pytest.mark.parametrize(
    "run", [pytest.param(kernels.get(o).implementations[n].fn, id=n) for o, n in found]
)
LAYOUT = Layout("float", 16)


def call(seed=0, t=7, h=3, w=9, k=5, stored=20, own=None, dtype=torch.float64):
    """A random call: ids may repeat, some are -1, one row lists nothing at all."""
    g = torch.Generator().manual_seed(seed)
    own = t if own is None else own

    def records(n, m):
        kept = torch.randn(n, 16, generator=g).to(dtype) if n else None
        return Records(kept, torch.randn(m, 16, generator=g).to(dtype) if m else None, LAYOUT)

    def ids(records, width):
        top = records.count + (0 if records.own is None else len(records.own))
        return torch.randint(-1, top, (t, width), generator=g)

    window, entries = records(stored, own), records(stored, 0)
    window_ids, entry_ids = ids(window, w), ids(entries, k)
    window_ids[-1], entry_ids[-1] = -1, -1
    q, sink = torch.randn(t, h, 16, generator=g).to(dtype), torch.randn(h, generator=g)
    return [q, window, window_ids, entries, entry_ids, sink, 0.3]


def by_hand(q, window, window_ids, entries, entry_ids, sink, scale):
    out = torch.zeros_like(q)
    for t in range(q.shape[0]):
        listed = [(window, i) for i in window_ids[t]]
        listed += [(entries, i) for i in entry_ids[t]] if entries is not None else []
        keys = [records.gather(i) for records, i in listed if i >= 0]
        for h in range(q.shape[1]):
            logits = torch.stack([*(q[t, h] @ key * scale for key in keys), sink[h].to(q.dtype)])
            share = torch.softmax(logits, 0)
            for p, key in zip(share, keys):
                out[t, h] += p * key
    return out


@each
@pytest.mark.parametrize("t", [1, 7, 70])
def test_is_a_softmax_over_the_listed_keys_and_the_sink(run, t):
    arguments = call(t=t)
    torch.testing.assert_close(run(*arguments), by_hand(*arguments))


@each
def test_without_entries_without_history_and_without_own_rows(run):
    arguments = call(stored=20)
    arguments[3] = arguments[4] = None
    torch.testing.assert_close(run(*arguments), by_hand(*arguments))
    arguments[1] = Records(arguments[1].stored, None, LAYOUT)
    arguments[2] = arguments[2].clamp(max=19)
    torch.testing.assert_close(run(*arguments), by_hand(*arguments))
    arguments[1] = Records(None, torch.randn(20, 16).double(), LAYOUT)
    torch.testing.assert_close(run(*arguments), by_hand(*arguments))


@each
def test_a_row_without_keys_is_zeros_and_a_large_sink_takes_all(run):
    arguments = call()
    out = run(*arguments)
    assert not out[-1].any() and out[:-1].any()
    arguments[5] = torch.full((3,), 1e4)
    assert not run(*arguments).any()
    arguments[5] = torch.full((3,), -torch.inf)
    torch.testing.assert_close(run(*arguments)[:-1], by_hand(*arguments)[:-1])


@each
@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
def test_packed_records_are_read_as_their_rounded_rows(run, format):
    q, window, window_ids, _, _, sink, scale = call(dtype=torch.float32)
    q = torch.cat([q, q], dim=2)
    layout, x = Layout(format, 32), torch.randn(20, 32)
    own = kernels.bind().cache_round(torch.randn(7, 32), format)
    packed = Records(layout.empty(20, torch.float32), own, layout)
    packed.write(torch.arange(20), x)
    plain = Records(packed.gather(torch.arange(20)), own, Layout("float", 32))
    a = run(q, packed, window_ids, None, None, sink, scale)
    assert torch.equal(a, run(q, plain, window_ids, None, None, sink, scale))


@each
@pytest.mark.parametrize("sick", ["own", "stored"])
@pytest.mark.parametrize("t", [7, 70])
def test_a_nan_key_reaches_only_the_rows_that_list_it(run, sick, t):
    arguments = call(t=t, w=3, dtype=torch.float32)
    window = arguments[1]
    bad = 4 if sick == "stored" else window.count
    arguments[2][2, 1] = bad
    well = run(*arguments)
    stored, own = window.stored.clone(), window.own.clone()
    (stored if sick == "stored" else own)[4 if sick == "stored" else 0] = torch.nan
    arguments[1] = Records(stored, own, LAYOUT)
    lists = (arguments[2] == bad).any(1)
    assert lists.any() and not lists.all()
    out = run(*arguments)
    assert out[lists].isnan().all()
    torch.testing.assert_close(out[~lists], well[~lists])


@each
def test_the_first_own_row_may_be_nan_where_nobody_lists_it(run):
    """Without a history -1 must not be read as own row 0."""
    own = torch.randn(4, 16)
    own[0] = torch.nan
    ids = torch.tensor([[-1, 1], [2, -1], [-1, -1]])
    records = Records(None, own, LAYOUT)
    out = run(torch.randn(3, 2, 16), records, ids, None, None, torch.zeros(2), 1.0)
    assert out.isfinite().all()


def test_gradients_of_queries_keys_and_sink_are_the_numeric_ones():
    _, window, window_ids, entries, entry_ids, sink, scale = call(t=4)
    g = torch.Generator().manual_seed(1)

    def run(q, own, entry_own, sink):
        a = Records(window.stored, own, LAYOUT)
        b = Records(entries.stored, entry_own, LAYOUT)
        ids = torch.cat([entry_ids, torch.full_like(entry_ids, entries.count)], dim=1)
        return kernels.bind().sparse_attend(q, a, window_ids, b, ids, sink, scale)

    leaves = [torch.randn(4, 3, 16, generator=g), window.own, torch.randn(2, 16, generator=g), sink]
    leaves = [x.double().detach().requires_grad_() for x in leaves]
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)
    run(*leaves).sum().backward()
    assert all(x.grad.any() for x in leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_an_invariant_row_does_not_depend_on_the_width_of_the_lists(dtype):
    """Lists are as wide as the longest sequence needs: windows grow in front, entries behind."""
    run = kernels.bind(batch_invariant=True).sparse_attend
    arguments = call(w=20, k=10, dtype=dtype)
    want = run(*arguments)
    for front in (1, 44, 64, 108):
        for behind in (0, 3, 54, 200):
            wider = list(arguments)
            wider[2] = torch.nn.functional.pad(arguments[2], (front, 0), value=-1)
            wider[4] = torch.nn.functional.pad(arguments[4], (0, behind), value=-1)
            assert torch.equal(run(*wider), want)
