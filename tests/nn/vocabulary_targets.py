"""Rank functions for what a model does with its vocabulary: the embedding, the last layer, the loss."""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from layer_targets import CLOSE, STRATEGY, same
from torch.nn.utils.prune import random_unstructured

import undertow as ut
from undertow.errors import UndertowError
from undertow.nn.cross_entropy import _gradient, _losses
from undertow.nn.sharded import Cut

TIED = {"0": ut.nn.Vocabulary(), "3": ut.nn.Column(gather_output=True)}


def embeddings(dtype: torch.dtype) -> bool:
    """Uneven rows, a padding row on every rank in turn, ids of any shape: values to the bit, gradients."""
    group = same()
    for words, padding, shape in ((7, None, (2, 3)), (11, 10, (5,)), (8, 0, (2, 1, 4)), (9, 4, (0,)), (9, 5, ())):
        plain = torch.nn.Embedding(words, 6, padding, dtype=dtype)
        for strategy in ("auto", "serial:net", "signaled:dma"):
            layer = ut.nn.VocabularyParallelEmbedding.from_embedding(plain, strategy=strategy)
            ids = torch.randint(0, words, shape)
            if ids.numel() > 1:
                ids.view(-1)[0] = words - 1 if padding is None else padding
            for one in (ids, ids.int()):
                plain.zero_grad()
                layer.zero_grad()
                want, got = plain(one), layer(one)
                assert got.dtype == dtype
                assert got.shape == want.shape
                assert torch.equal(got, want)
                weight = torch.randint(-3, 4, want.shape).to(dtype)
                for y in (want, got):
                    (y * weight).sum().backward()
                assert torch.equal(layer.weight.grad, layer.cuts["weight"].take(plain.weight.grad, group.rank))
                with torch.no_grad():
                    assert torch.equal(layer(one), want)
    made = ut.nn.VocabularyParallelEmbedding(12, 4, -1, unit=3, dtype=dtype)
    assert made.padding_idx == 11
    return len(made.weight) == 3 * len(torch.arange(4).tensor_split(group.size)[group.rank])


def in_sequence_parallel(dtype: torch.dtype) -> bool:
    """Each rank's rows of the whole, to the bit, and gradients of the table; rows as they are told, none too."""
    group = same()
    plain = torch.nn.Embedding(11, 6, 10, dtype=dtype)
    layer = ut.nn.VocabularyParallelEmbedding.from_embedding(plain, sequence_parallel=True)
    graph = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for shape in ((7,), (5, 3), (2, 1, 4), (group.size - 1, 2)):
        ids = torch.randint(0, 11, shape)
        others = [shape[0] - 1, 1, *[0] * group.size][: group.size]
        for rows in (None, others if sum(others) == shape[0] else None):
            mine = (lambda one: one.tensor_split(group.size)) if rows is None else (lambda one: one.split(others))  # noqa: B023
            for called in (layer, graph):
                plain.zero_grad()
                layer.zero_grad()
                want, got = plain(ids), called(ids, rows)
                assert torch.equal(got, mine(want)[group.rank])
                weight = torch.randint(-3, 4, want.shape).to(dtype)
                (want * weight).sum().backward()
                (got * mine(weight)[group.rank]).sum().backward()
                assert torch.equal(layer.weight.grad, layer.cuts["weight"].take(plain.weight.grad, group.rank))
    made = ut.nn.parallelize(torch.nn.Sequential(plain), {"0": ut.nn.Vocabulary(sequence_parallel=True)})
    assert made[0].sequence_parallel
    said = []
    for given in ((torch.tensor(3), None), (torch.zeros(5, 2, dtype=torch.int64), [1] * group.size)):
        try:
            layer(*given)
        except UndertowError as error:
            said.append(str(error))
    counts = f"{group.size} counts that add up to 5, the first dimension of ids"
    return said == [
        "ids is of shape [], but must be [S, ...], whose rows ranks share out.",
        f"rows is {[1] * group.size}, but must be {counts}.",
    ]


def wrong_words() -> list[str]:
    """All ranks refuse, and the group goes on."""
    same()
    layer = ut.nn.VocabularyParallelEmbedding(5, 2)
    said = []
    for ids in (
        torch.tensor([[0, 1], [5, 2]]), torch.tensor([-1]), torch.tensor([1.0]),
        torch.zeros(1, dtype=torch.int64, device="meta"),
    ):  # fmt: skip
        try:
            layer(ids)
        except UndertowError as error:
            said.append(str(error))
    for options in ({"max_norm": 1.0}, {"sparse": True}):
        try:
            ut.nn.VocabularyParallelEmbedding.from_embedding(torch.nn.Embedding(5, 2, **options))  # type: ignore[arg-type]
        except UndertowError as error:
            said.append(str(error))
    for strategy in ("quickly", "serial:pear"):
        try:
            ut.nn.VocabularyParallelEmbedding(5, 2, strategy=strategy)
        except UndertowError as error:
            said.append(str(error).partition(",")[0])
    assert layer(torch.tensor([4])).shape == (1, 2)
    return said


def a_word_that_nobody_looked_at(word: int) -> bool:
    """The lookup itself fails, on every rank alike."""
    same()
    layer = ut.nn.VocabularyParallelEmbedding(5, 2)
    layer._check = lambda ids: None  # type: ignore[method-assign]
    try:
        layer(torch.tensor([0, word]))
    except IndexError:
        return True
    return False


def _language_model() -> torch.nn.Sequential:
    """Words to words, the first and the last layer's weight one."""
    model = torch.nn.Sequential(
        torch.nn.Embedding(13, 8), torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 13, bias=False)
    )
    model[3].weight = model[0].weight
    return model


def tied() -> bool:
    """Cut alike they stay one parameter: logits, training steps, checkpoints of the ordinary form."""
    same()
    plain = _language_model()
    model = ut.nn.parallelize(copy.deepcopy(plain), TIED, strategy=STRATEGY)
    assert model[0].weight is model[3].weight
    assert len(list(model.parameters())) == len(list(plain.parameters()))
    text = torch.randint(0, 13, (4, 9), generator=torch.Generator(torch.get_default_device()).manual_seed(2))
    for _ in range(5):
        found = []
        for one in (plain, model):
            logits = one(text[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
            loss.backward()
            found.append(logits.detach())
            with torch.no_grad():
                for parameter in one.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
        torch.testing.assert_close(found[1], found[0], **CLOSE)
    whole = ut.nn.full_state_dict(model)
    assert whole["0.weight"] is whole["3.weight"]
    for name, one in plain.state_dict().items():
        torch.testing.assert_close(whole[name], one, **CLOSE)
    other = _language_model()
    model.load_state_dict(other.state_dict())
    assert all(torch.equal(one, other.state_dict()[name]) for name, one in ut.nn.full_state_dict(model).items())
    assert model[0].weight is model[3].weight
    for _ in range(2):  # each gives every module a parameter
        given = {name: torch.randn_like(one) for name, one in other.state_dict().items() if name != "3.weight"}
        model.load_state_dict({**given, "3.weight": given["0.weight"]}, assign=True)
        assert model[0].weight is model[3].weight
        assert torch.equal(ut.nn.full_state_dict(model)["3.weight"], given["0.weight"])
        given = {"3.weight": torch.randn_like(given["0.weight"])}  # as of a checkpoint that knows one name
        model.load_state_dict(given, assign=True, strict=False)
        assert model[0].weight is model[3].weight
        assert torch.equal(ut.nn.full_state_dict(model)["0.weight"], given["3.weight"])
    for part in (model[0], model[3]):  # one of the two alone
        part.load_state_dict({"weight": torch.randn(13, 8)}, assign=True)
        assert model[0].weight is model[3].weight
    held = model[3]
    model[3] = torch.nn.Identity()
    model.load_state_dict(dict(list(other.state_dict().items())[:-1]), assign=True)
    assert held.weight is model[0].weight
    model[3] = held
    held.weight = torch.nn.Parameter(held.weight.detach().clone())  # untied by the user
    model.load_state_dict(other.state_dict(), assign=True)
    return model[0].weight is not model[3].weight


def hooked() -> bool:
    """Hooks of what is replaced go on, and who set them can still remove them."""
    same()
    model, seen = _language_model(), []
    model[3].weight = torch.nn.Parameter(model[3].weight.detach().clone())
    handles = [
        model[0].register_forward_hook(lambda *_: seen.append("words")),
        model[1].register_forward_pre_hook(lambda *_, **__: seen.append("rows"), with_kwargs=True),
        model[3].register_full_backward_hook(lambda *_: seen.append("columns")),
    ]
    ut.nn.parallelize(model, {**TIED, "1": ut.nn.Row(), "0": ut.nn.Vocabulary()}, strategy=STRATEGY)
    x = model[0](torch.tensor([1, 2]))
    model[3](model[1](x[:, : model[1].weight.shape[1]])).sum().backward()
    assert seen == ["words", "rows", "columns"]
    for handle in handles:
        handle.remove()
    model[0](torch.tensor([1]))
    assert len(seen) == 3
    said = []
    for prune in (lambda one: random_unstructured(one, "weight", 0.5), torch.nn.utils.weight_norm):
        model = _language_model()
        prune(model[1])
        try:
            ut.nn.parallelize(model, {"1": ut.nn.Row()})
        except UndertowError as error:
            said.append(str(error))
    must = "a parameter: prune.remove, remove_weight_norm or remove_parametrizations makes it one"
    return said == [f"weight of 1 is computed from other tensors, but must be {must}."] * 2


def tied_refusals() -> list[str]:
    same()
    said = []
    for plan in (
        {"0": ut.nn.Vocabulary()}, {"3": ut.nn.Column()}, {**TIED, "3": ut.nn.Row()},
        {**TIED, "0": ut.nn.Vocabulary(unit=13)}, {"3": ut.nn.Row()}, {"1": ut.nn.Vocabulary()},
    ):  # fmt: skip
        model = _language_model()
        try:
            ut.nn.parallelize(model, plan)
        except UndertowError as error:
            said.append(str(error))
        assert not any(isinstance(one, ut.nn.Sharded) for one in model.modules())
    return said


def losses(dtype: torch.dtype) -> bool:
    """Against torch's own of all columns: uneven shards, ignored rows, smoothing, reductions, some rows at a time."""
    group = same()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    close: dict[str, Any] = CLOSE if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    module = sys.modules["undertow.nn.cross_entropy"]  # its name is also the function's
    for at_once in (module._AT_ONCE, 8):
        module._AT_ONCE = at_once  # type: ignore[attr-defined]
        for classes, rows, unit in ((7, 5, 1), (12, 6, 3), (9, 1, 1), (8, 0, 1)):
            cut = Cut.of("classes", 0, (classes,), (unit,), group.size)
            logits = (4 * torch.randn(rows, classes)).to(dtype)
            if rows > 2:
                logits[1] += 3e4  # far from what exp can hold
                logits[2, :2] = -torch.inf
            target = torch.randint(2, classes, (rows,))
            if rows > 1:
                target[-1] = -7
            for smoothing in (0.0, 0.3):
                if smoothing and rows > 2:
                    logits[2, :2] = -4  # a smoothed loss of -inf is inf
                for reduction in ("mean", "sum", "none"):
                    options = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": -7}
                    whole = logits.to(wide, copy=True).requires_grad_()
                    want = torch.nn.functional.cross_entropy(whole, target, **options)
                    mine = cut.take(logits.t(), group.rank).t().requires_grad_()
                    got = ut.nn.cross_entropy(mine, target, classes, unit=unit, **options)
                    assert got.dtype == wide
                    torch.testing.assert_close(got, want, equal_nan=True, **close)
                    if not rows:
                        continue
                    weight = torch.randn_like(want)
                    for one in (want, got):
                        (one * weight).sum().backward()
                    near = close if dtype in (torch.float64, torch.float32) else {"rtol": 2e-2, "atol": 1e-2}
                    assert mine.grad.dtype == dtype
                    torch.testing.assert_close(mine.grad.to(wide), cut.take(whole.grad.t(), group.rank).t(), **near)
                    everywhere = group.exchange(got.detach().tolist(), "losses")
                    assert all(one == everywhere[0] for one in everywhere)
    return True


def loss_refusals() -> list[str]:
    group = same()
    logits, target, said = torch.randn(3, 4 if group.rank == 0 else 3), torch.tensor([0, 6, 2]), []
    for given, wanted, options in (
        (logits, torch.tensor([0, 7, 2]), {}), (logits, target, {"reduction": "max"}), (logits[0], target, {}),
        (logits, target.int(), {}), (logits, target, {"label_smoothing": 1.5}), (logits, target - 1, {}),
    ):  # fmt: skip
        try:
            ut.nn.cross_entropy(given, wanted, 7, **options)
        except UndertowError as error:
            said.append(str(error))
    ut.nn.cross_entropy(logits, target, 7)
    return said


def compiled() -> bool:
    """Words in, loss out: one graph, the same loss and gradients."""
    group = same()
    plain = _language_model()
    plan = {"0": ut.nn.Vocabulary(), "3": ut.nn.Column()}
    model = ut.nn.parallelize(plain, plan, strategy=STRATEGY)
    text = torch.randint(0, 13, (4, 9), generator=torch.Generator(torch.get_default_device()).manual_seed(2))

    def loss() -> torch.Tensor:
        logits = model(text[:, :-1])
        return ut.nn.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten(), 13, label_smoothing=0.1)

    want = loss()
    want.backward()
    grads = [one.grad.clone() for one in model.parameters()]
    model.zero_grad()
    got = torch.compile(loss, fullgraph=True, backend="aot_eager")()
    got.backward()
    torch.testing.assert_close(got, want, **CLOSE)
    graph = torch.compile(ut.nn.cross_entropy, fullgraph=True, backend="aot_eager", dynamic=True)
    for classes, rows in ((6, 3), (8, 4), (9, 5)):
        mine = torch.randn(rows, len(torch.arange(classes).tensor_split(2)[group.rank]))
        label = torch.arange(rows) % classes
        torch.testing.assert_close(graph(mine, label, classes), ut.nn.cross_entropy(mine, label, classes), **CLOSE)
    for one, grad in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(one.grad, grad, **CLOSE)
    logits = torch.randn(3, 4 if group.rank == 0 else 3, requires_grad=True)
    target = torch.tensor([0, 6, 2])
    first = 0 if group.rank == 0 else 4
    name = group.name
    torch.library.opcheck(_losses, (logits, target, first, 7, 0.1, name))
    with torch.no_grad():
        rows, most, log = _losses(logits, target, first, 7, 0.1, name)
    torch.library.opcheck(_gradient, (torch.ones_like(rows), logits.detach(), target, most, log, first, 7, 0.1))
    return True
