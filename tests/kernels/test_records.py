"""Records: one index space over storage and own rows, in every layout."""

import pytest
import torch

from deepinfer import kernels
from deepinfer.kernels import Layout, Records
from deepinfer.kernels.numerics import taken

LAYOUTS = [
    Layout("float", 64),
    Layout("mxfp8", 64),
    Layout("nvfp4", 64),
    Layout("mxfp4", 64),
    Layout("mxfp4", 64, token_interleaved=False, block=8),
    Layout("mxfp8", 64, token_interleaved=False, block=4),
]
ops = kernels.bind()
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


def rows(t, seed=0):
    return torch.randn(t, 64, generator=torch.Generator().manual_seed(seed))


@layouts
def test_what_is_written_is_read_back_rounded(layout):
    records = Records(layout.empty(24, torch.float32), None, layout)
    assert records.count == 24
    x, ids = rows(5), torch.tensor([3, 23, 1, 8, 9])
    records.write(ids, x)
    assert torch.equal(records.gather(ids), ops.cache_round(x, layout.format))
    others = [i for i in range(24) if i not in ids.tolist()]
    assert not records.gather(torch.tensor(others)).any()


@layouts
def test_own_rows_follow_the_stored_ones_and_minus_one_is_zeros(layout):
    x, own = ops.cache_round(rows(8), layout.format), rows(3, seed=1)
    records = Records(layout.empty(8, torch.float32), own, layout)
    records.write(torch.arange(8), x)
    ids = torch.tensor([[-1, 8, 2], [10, 7, 9]])
    want = torch.stack(
        [
            torch.stack([torch.zeros(64), own[0], x[2]]),
            torch.stack([own[2], x[7], own[1]]),
        ]
    )
    assert torch.equal(records.gather(ids), want)
    assert records.gather(ids, torch.float64).dtype == torch.float64


@layouts
def test_negative_ids_write_nowhere_and_record_zero_stays_zero(layout):
    records = Records(layout.empty(16, torch.float32), None, layout)
    x = rows(4)
    x[1] = torch.nan
    records.write(torch.tensor([-1, -1, 0, 5]), x)
    assert not records.gather(torch.tensor([0, 1, 2, -1])).any()
    assert torch.equal(records.gather(torch.tensor([5])), ops.cache_round(x[3:], layout.format))


def test_planar_blocks_hold_data_then_scales():
    layout = Layout("mxfp4", 64, token_interleaved=False, block=8)
    records = Records(layout.empty(16, torch.float32), None, layout)
    x = rows(16)
    records.write(torch.arange(16), x)
    packed = ops.pack(x, "mxfp4")
    packed[0] = 0
    for block in range(2):
        mine = packed[8 * block : 8 * block + 8]
        want = torch.cat([mine[:, :32].flatten(), mine[:, 32:].flatten()])
        assert torch.equal(records.stored[block], want)


@layouts
def test_a_nan_of_another_row_is_not_read(layout):
    records = Records(layout.empty(8, torch.float32), torch.full((2, 64), torch.nan), layout)
    records.write(torch.tensor([3, 4]), torch.stack([rows(1)[0], torch.full((64,), torch.nan)]))
    assert records.gather(torch.tensor([-1, 3, 0])).isfinite().all()
    assert records.gather(torch.tensor([4, 8])).isnan().all()


@pytest.mark.parametrize("ids", [torch.tensor([[-1, -1]]), torch.zeros(0, 2).long()])
@pytest.mark.parametrize("own", [None, torch.zeros(0, 64)])
def test_nothing_stored_and_nothing_own(ids, own):
    out = Records(None, own, Layout("float", 64)).gather(ids)
    assert out.shape == (*ids.shape, 64) and not out.any()


def test_gradients_reach_own_rows_through_a_history():
    own = rows(3).requires_grad_()
    records = Records(rows(4), own, Layout("float", 64))
    records.gather(torch.tensor([[4, 1], [6, 4], [-1, -1]])).sum().backward()
    assert own.grad[:, 0].tolist() == [2, 0, 1]


def test_misfits_are_refused():
    with pytest.raises(ValueError, match="record 0 is reserved"):
        Records(torch.zeros(0, 64), None, Layout("float", 64))
    with pytest.raises(ValueError, match=r"wants \(n, 66\)"):
        Records(torch.zeros(4, 64).byte(), None, Layout("mxfp8", 64))
    with pytest.raises(TypeError, match="uint8"):
        Records(torch.zeros(4, 64).byte(), None, Layout("float", 64))
    with pytest.raises(ValueError, match="own has shape"):
        Records(None, torch.zeros(4, 32), Layout("float", 64))
    with pytest.raises(ValueError, match="no storage"):
        Records(None, rows(1), Layout("float", 64)).write(torch.tensor([0]), rows(1))
    with pytest.raises(ValueError, match="mxfp9"):
        Layout("mxfp9", 64)
    with pytest.raises(ValueError, match="token interleaved"):
        Layout("float", 64, token_interleaved=False)


@pytest.mark.parametrize("shape", [(2,), (2, 4)])
def test_a_row_taken_often_gets_its_whole_gradient(shape):
    """A sum in bfloat16 stops at 256. For rows of one number torch sums so on a CPU too."""
    rows = torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)
    ids = torch.zeros(1000, 1, dtype=torch.long)
    taken(rows, ids).sum().backward()
    assert rows.grad.dtype == torch.bfloat16
    assert (rows.grad[0] == 1000).all() and (rows.grad[1] == 0).all()
    assert taken(rows, torch.tensor([[1, 0]])).shape == (1, 2, *shape[1:])
