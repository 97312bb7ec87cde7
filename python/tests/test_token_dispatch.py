"""The operators that send tokens to ranks, without ranks."""

import pytest
import torch

import sonicmoe  # noqa: F401 - registers the operators


def test_token_dispatch():
    """Of three tokens, to two ranks of two experts. The second goes to rank 1 alone."""
    ids = torch.tensor([[0, 2, 1], [3, 7, -1], [1, 2, 3]], dtype=torch.int32)
    scores = torch.arange(1, 10).view(3, 3).float()

    def dispatched(packed):
        made = torch.ops.sonicmoe.token_dispatch(ids, scores, 2, 2, packed)
        numbers, tokens, choices, rows, places = made
        local, bits = choices.unflatten(1, (2, 2)).unbind(1)
        return numbers.tolist(), tokens.tolist(), local, bits.view(torch.float32), rows, places

    numbers, tokens, local, of_rows, rows, places = dispatched(True)
    assert numbers == [[2, 3, 3, 4, 2, 3]]
    assert tokens == [0, 2, 0, 1, 2, 0]
    assert local[:5].tolist() == [[0, 1], [1, -1], [0, -1], [1, -1], [0, 1]]
    assert of_rows[:5].tolist() == [[1, 3], [7, 0], [2, 0], [4, 0], [8, 9]]
    assert rows.tolist() == [[0, 2], [-1, 3], [1, 4]]
    assert places.tolist() == [[1, 5, 2], [7, 0, 0], [3, 9, 10]]

    numbers, tokens, local, of_rows, rows, places = dispatched(False)
    assert numbers == [[2, 3, 3, 4, 2, 3]]
    assert tokens == [0, 2, 0, 0, 1, 2]
    assert local.tolist() == [[0, 1], [1, -1], [-1, -1], [0, -1], [1, -1], [0, 1]]
    assert of_rows.tolist() == [[1, 3], [7, 0], [0, 0], [2, 0], [4, 0], [8, 9]]
    assert rows.tolist() == [[0, 3], [-1, 4], [1, 5]]
    assert places.tolist() == [[1, 7, 2], [9, 0, 0], [3, 11, 12]]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tokens, top_k", [(0, 2), (9, 3)])
def test_token_dispatch_is_an_operator(tokens, top_k, packed):
    ids = torch.randint(8, (tokens, top_k), dtype=torch.int32)
    args = ids, torch.rand(tokens, top_k), 2, 4, packed
    torch.library.opcheck(torch.ops.sonicmoe.token_dispatch.default, args)


def test_token_dispatch_refuses_other_tensors():
    ids, scores = torch.zeros(4, 2, dtype=torch.int32), torch.zeros(4, 2)
    for text, arguments in (
        ("^ids: got .*int64", (ids.long(), scores, 2, 2, True)),
        ("^ids: got ", (ids[0], scores, 2, 2, True)),
        ("^scores: got ", (ids, scores[:3], 2, 2, True)),
        ("^scores: got .*float64", (ids, scores.double(), 2, 2, True)),
        ("^ranks: got 0, allowed: 1 to 1024", (ids, scores, 2, 0, True)),
        ("^experts: got 0, allowed: ", (ids, scores, 0, 2, True)),
    ):
        with pytest.raises(ValueError, match=text):
            torch.ops.sonicmoe.token_dispatch(*arguments)


def sent_rows(x, tokens, counts, places=3):
    """What two ranks have after rows were sent, of what was 9 before."""
    there = [torch.full((places, x.shape[1]), 9.0, dtype=x.dtype) for _ in range(2)]
    to = torch.tensor([tensor.data_ptr() for tensor in there])
    as_ints = torch.tensor(tokens, dtype=torch.int32), torch.tensor(counts, dtype=torch.int32)
    torch.ops.sonicmoe.send_rows(x, *as_ints, to)
    return [tensor[:, 0].tolist() for tensor in there]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_send_rows(dtype):
    x = torch.tensor([0.0, 1.0, 2.0], dtype=dtype).unsqueeze(1).expand(3, 8).contiguous()
    assert sent_rows(x, [2, 0, 0, 1, 1, 2], [2, 3]) == [[2, 0, 9], [1, 1, 2]]
    assert sent_rows(x, [0, 3, 1, -1, 2, 0], [3, 2]) == [[0, 9, 1], [9, 2, 9]]
    assert sent_rows(x, [0] * 6, [0, -1]) == [[9, 9, 9]] * 2


def test_send_rows_refuses_other_tensors():
    x, tokens, counts = torch.zeros(3, 8), torch.zeros(6).int(), torch.zeros(2).int()
    to = torch.zeros(2, dtype=torch.int64)
    for text, arguments in (
        ("^x: got ", (x[0], tokens, counts, to)),
        ("^hidden: got 7, allowed: ", (x[:, :7].contiguous(), tokens, counts, to)),
        ("^row_tokens: got ", (x, tokens[:5], counts, to)),
        ("^counts: got ", (x, tokens, counts.long(), to)),
        ("^to: got .*int32", (x, tokens, counts, to.int())),
        ("^to: got null, allowed: ", (x, tokens, counts, to)),
        ("^ranks: got 0, allowed: 1 to 128", (x, tokens[:0], counts[:0], to[:0])),
    ):
        with pytest.raises(ValueError, match=text):
            torch.ops.sonicmoe.send_rows(*arguments)
