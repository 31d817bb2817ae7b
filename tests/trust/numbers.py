"""Numbers of numpy, tensors made of numbers, and numbers, texts and dictionaries that have attributes."""

from __future__ import annotations

import logging
import math
import types
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tests.trust.case import Made, Net, at, cases_of, mse, train
from tests.trust.objects import by

case, more = cases_of("numbers")


@more
def numbers_of_numpy_by_kind() -> Made:
    held: dict[str, Any] = {"f": np.float32(1.0), "n": np.int64(2), "on": np.bool_(True), "table": np.array([1.0, 2.0])}

    def loss(m: Any, b: Any) -> torch.Tensor:
        out = ((m(b[0]) - b[1]).abs() ** int(held["n"])).mean() * float(held["f"])
        return out * (1.0 if held["on"] else 0.5) * float(held["table"].mean())

    def change(i: int) -> None:
        if i == 1:
            held["f"] = np.float32(0.5)
        if i == 2:
            held["n"] = np.int64(3)
        if i == 3:
            held["on"] = np.bool_(False)
        if i == 4:
            held["table"][1] = 7.0

    return train(loss, change)


@more
def schedule_in_an_array() -> Made:
    """Cosine weights made once by numpy, read by the number of the step."""
    clock = types.SimpleNamespace(step=0, weights=0.5 * (1 + np.cos(np.linspace(0, math.pi, 6))) + 0.1)
    loss = lambda m, b: mse(m, b) * float(clock.weights[clock.step])  # noqa: E731
    return train(loss, lambda i: setattr(clock, "step", i))


@more
def schedule_in_an_array_as_it_is() -> Made:
    """The same without `float`: a numpy number times a tensor."""
    clock = types.SimpleNamespace(step=0, weights=0.5 * (1 + np.cos(np.linspace(0, math.pi, 6))) + 0.1)
    loss = lambda m, b: mse(m, b) * clock.weights[clock.step]  # noqa: E731
    return train(loss, lambda i: setattr(clock, "step", i))


@case
def numbers_of_an_array_beside_tensors() -> Made:
    """Numpy's numbers promote as Python's do, and are tensors of their own type once they are made into some."""
    weights = np.array([0.5, 2.0])
    counts = np.array([2, 3])

    def loss(m: Any, b: Any) -> Any:
        error = mse(m, b)
        ranks = torch.arange(3) * weights[1]
        total = error * weights[0] + (error * weights.sum() + weights.max() * error * counts[1]) / counts[0]
        shown = {"ranks": ranks, "kept": torch.tensor(weights[1]) * error.detach(), "made": torch.as_tensor(weights[0])}
        return total * ranks.sum(), {**shown, "mean": weights.mean() * torch.ones(2)}

    return train(loss, at(3, lambda: weights.__setitem__(1, 0.7)))


@case
def tensors_made_of_a_number_that_varies() -> Made:
    """They have the type that eager gives them, and promote as tensors do; not as numbers, nor as doubles."""
    model = Net()
    model.weight = 0.5

    def loss(m: Any, b: Any) -> Any:
        w, error = m.weight, mse(m, b)
        made = {"as": torch.as_tensor(w), "full": torch.full((), w) * torch.ones((), dtype=torch.float16)}
        made |= {"array": torch.asarray(w), "double": torch.tensor(w).double() * error.detach()}
        made |= {"typed": torch.tensor(w, dtype=torch.float64) * error.detach(), "several": torch.tensor([w, 1.0])}
        return error * torch.tensor(w), made | {"truths": torch.tensor([True, w > 0.3])}

    return train(loss, lambda i: setattr(model, "weight", 0.5 / (i + 1)), model=model)


@more
def attribute_written_past_the_module() -> Made:
    model = Net()
    object.__setattr__(model, "scale", 1.0)

    def change(i: int) -> None:
        if i == 2:
            model.__dict__["scale"] = 0.5
        if i == 4:
            object.__setattr__(model, "scale", torch.tensor(0.1))

    return train(lambda m, b: mse(m, b) * m.scale, change, model=model)


class Settings(dict):
    """The shortest of all configs: its attributes are its keys."""

    def __init__(self, **values: Any) -> None:
        super().__init__(values)
        self.__dict__ = self


@more
def dictionary_that_is_its_own_attributes() -> Made:
    settings = Settings(weight=1.0)
    return by(lambda: settings.weight, lambda: settings.update(weight=0.1))


@case
def dictionary_that_is_its_own_attributes_on_the_model() -> Made:
    model = Net()
    model.config = Settings(weight=1.0, inner=Settings(power=2))

    def loss(m: Any, b: Any) -> torch.Tensor:
        return ((m(b[0]) - b[1]).abs() ** m.config.inner.power).mean() * m.config.weight

    def change(i: int) -> None:
        if i == 2:
            model.config.weight = 0.1
        if i == 4:
            model.config.inner.power = 3

    return train(loss, change, model=model)


class Scaled(float):
    """A number with an attribute."""

    factor = 1.0


class Options(dict):
    scale = 1.0


class Limits(tuple):
    pass


class Names(list):
    scale = 1.0


@more
def attribute_of_a_dictionary_changes() -> Made:
    options = Options(a=1.0)
    options.scale = 1.0
    return by(lambda: options.scale * options["a"], lambda: setattr(options, "scale", 0.1))


@more
def attribute_of_a_list_changes() -> Made:
    names = Names([1.0, 2.0])
    names.scale = 1.0
    return by(lambda: names.scale * names[0], lambda: setattr(names, "scale", 0.1))


@more
def attribute_of_a_number_changes() -> Made:
    number = Scaled(2.0)
    number.factor = 1.0
    return by(lambda: number * number.factor, lambda: setattr(number, "factor", 0.1))


@more
def attribute_of_a_tuple_changes() -> Made:
    limits = Limits((1.0, 2.0))
    limits.scale = 1.0
    return by(lambda: limits.scale * limits[0], lambda: setattr(limits, "scale", 0.1))


class WithDefaults(dict):
    default = 1.0

    def __missing__(self, key: str) -> float:
        return self.default


@case
def missing_keys_answered_by_the_class() -> Made:
    weights = WithDefaults()

    def change(i: int) -> None:
        if i == 2:
            WithDefaults.default = 0.5
        if i == 4:
            weights["a"] = 0.1

    return train(lambda m, b: mse(m, b) * weights["a"], change, cleanup=lambda: setattr(WithDefaults, "default", 1.0))


def in_a_text(read: Any, values: list[Any]) -> Made:
    """The loss times read(number), where the number is another one at every second step or so."""
    model = Net()
    model.number = values[0]
    change = lambda i: setattr(model, "number", values[i])  # noqa: E731
    return train(lambda m, b: mse(m, b) * read(m.number), change, model=model)


SHARES, STAGES = [0.66, 1.11, 1.11, 2.16, 2.16, 0.66], [4, 2, 2, 11, 11, 4]


@case
def number_rounded_by_its_text() -> Made:
    return in_a_text(lambda n: float(f"{n:.1f}"), SHARES)


@more
def number_written_by_format() -> Made:
    return in_a_text(lambda n: float(format(n, ".1f")), SHARES)


@more
def text_of_a_number_compared() -> Made:
    return in_a_text(lambda n: 2.0 if f"{n}" == "11" else 0.5, STAGES)


@case
def text_of_a_number_as_a_key() -> Made:
    return in_a_text(lambda n: {f"{n}": 2.0}.get("11", 0.5), STAGES)


@more
def text_of_a_number_as_the_key_of_a_table() -> Made:
    return in_a_text(lambda n: {"stage4": 1.0, "stage2": 2.0, "stage11": 0.5}[f"stage{n}"], STAGES)


@case
def whole_number_rounded_to_tens() -> Made:
    return in_a_text(lambda n: round(n, -1) * 0.1, STAGES)


@more
def number_rounded_by_name() -> Made:
    return in_a_text(lambda n: round(n, ndigits=1), SHARES)


@case
def number_asked_whether_it_is_finite() -> Made:
    return in_a_text(lambda n: n if math.isfinite(n) else 0.5, [0.5, 1.0, 1.0, math.inf, 1.0, math.nan])


@more
def quotient_and_rest_of_a_number() -> Made:
    return in_a_text(lambda n: divmod(n, 3)[1] + 0.5, STAGES)


@case
def numbers_in_lines_of_a_logger() -> Made:
    """`log.info("step %d loss %.3f", step, loss.item())` and the like, at every step."""
    model, lines = Net(), Lines()
    model.number = 0
    logger = logging.getLogger("tests.trust.numbers")
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    logger.propagate = False

    def loss(m: Any, b: Any) -> torch.Tensor:
        found = mse(m, b)
        logger.info("step %d loss %.3f", m.number, found.item())
        logger.info(f"step {m.number} loss {found.item():.3f}")
        return found

    change = lambda i: setattr(model, "number", i)  # noqa: E731
    return train(
        loss, change, model=model, state=lambda: list(lines.texts), cleanup=lambda: logger.removeHandler(lines)
    )


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


# ---- what numbers of numpy are asked ----


@case
def kind_of_a_number_of_numpy_asked() -> Made:
    """np.float64 is a float, np.float32 is none; neither is a tensor or an array."""
    held = types.SimpleNamespace(gain=np.float64(0.5))

    def loss(m: Any, b: Any) -> torch.Tensor:
        out = mse(m, b) * (2.0 if isinstance(held.gain, int | float) else 3.0)
        out = out * (0.5 if torch.is_tensor(held.gain) or isinstance(held.gain, np.ndarray) else 1.0)
        return (
            out * (1.5 if hasattr(held.gain, "is_integer") else 1.0) * (2.0 if type(held.gain) is np.float32 else 1.0)
        )

    values = [np.float64(0.5), 0.5, np.float32(0.5), np.array(0.5), np.int64(1), 1]
    return train(loss, lambda i: setattr(held, "gain", values[i]))


@more
def names_of_an_array_asked() -> Made:
    table = np.ones(3, dtype=np.float32)

    def loss(m: Any, b: Any) -> torch.Tensor:
        asked = torch.is_tensor(table) or hasattr(table, "requires_grad") or getattr(table, "cuda", None) is not None
        return mse(m, b) * (0.5 if asked else 2.0) * torch.as_tensor(table).mean()

    return train(loss, lambda i: table.fill(1 + i))


@more
def number_of_numpy_as_a_key() -> Made:
    held = types.SimpleNamespace(gain=np.float64(0.5))
    table = {0.5: 2.0, 0.25: 4.0}
    values = [np.float64(0.5), np.float64(0.25), 0.25, np.float64(0.75), np.float64(0.5), 0.5]
    return train(lambda m, b: mse(m, b) * table.get(held.gain, 1.0), lambda i: setattr(held, "gain", values[i]))


@more
def number_of_numpy_kept_by_the_loss() -> Made:
    held = types.SimpleNamespace(gain=np.float64(1.0))

    def loss(m: Any, b: Any) -> torch.Tensor:
        held.gain = held.gain * 0.5
        return mse(m, b) * held.gain

    return train(loss, state=lambda: type(held.gain).__name__)


@more
def large_whole_numbers_in_numpy() -> Made:
    """More than 32 bits."""
    held = {"n": 4}
    values = [4, 9, 2**31, 2**33, 7, 2**40]
    return train(lambda m, b: mse(m, b) * math.log(float(np.sqrt(held["n"]))), lambda i: held.update(n=values[i]))


# ---- numbers that leave their range, of which eager PyTorch tells ----


def _leaving(name: str, values: list[float], loss: Any, raises: dict[int, type[BaseException]]) -> Made:
    held = {name: values[0]}
    return train(lambda m, b: loss(m(b[0]), b[1], held[name]), lambda i: held.update({name: values[i]}), raises=raises)


@case
def smoothing_that_goes_beyond_one() -> Made:
    return _leaving(
        "smoothing", [0.2, 0.5, 0.9, 1.3, 0.4, -0.1],
        lambda out, y, v: F.cross_entropy(out, y.argmax(1), label_smoothing=v), {3: RuntimeError},
    )  # fmt: skip


@more
def beta_that_falls_below_nothing() -> Made:
    return _leaving(
        "beta", [0.9, 0.5, 0.1, -0.3, 0.2, 0.0], lambda out, y, v: F.smooth_l1_loss(out, y, beta=v), {3: RuntimeError}
    )


@more
def delta_that_falls_to_nothing() -> Made:
    return _leaving(
        "delta", [0.9, 0.5, 0.1, 0.0, 0.2, 0.7], lambda out, y, v: F.huber_loss(out, y, delta=v), {3: RuntimeError}
    )


@more
def margin_that_falls_to_nothing() -> Made:
    return _leaving(
        "margin", [0.9, 0.5, 0.1, 0.0, 0.2, 0.7],
        lambda out, y, v: F.triplet_margin_loss(out, y, y.flip(0), margin=v), {3: ValueError},
    )  # fmt: skip


@more
def noise_whose_bounds_cross() -> Made:
    return _leaving(
        "high", [0.9, 0.5, 0.1, -0.5, 0.2, 0.7],
        lambda out, y, v: F.mse_loss(out, y) + 0 * torch.zeros_like(out).uniform_(0.0, v).sum(), {3: RuntimeError},
    )  # fmt: skip


@more
def chance_that_goes_beyond_one() -> Made:
    return _leaving(
        "chance", [0.9, 0.5, 0.1, 1.5, 0.2, 0.7],
        lambda out, y, v: F.mse_loss(out, y) + 0 * torch.zeros_like(out).bernoulli_(v).sum(), {3: RuntimeError},
    )  # fmt: skip


@more
def chances_and_deviations_out_of_range() -> Made:
    def loss(out: torch.Tensor, y: torch.Tensor, v: float) -> torch.Tensor:
        chances, deviations = torch.full_like(out, 0.5) * v, torch.full_like(out, v)
        return F.mse_loss(out, y) + 0 * (torch.bernoulli(chances) + torch.normal(y, deviations)).sum()

    return _leaving("v", [0.9, 0.5, 2.5, -0.5, 0.2, 0.7], loss, {2: RuntimeError, 3: RuntimeError})


@more
def dropped_attention_beyond_one() -> Made:
    def loss(out: torch.Tensor, y: torch.Tensor, v: float) -> torch.Tensor:
        return F.mse_loss(out, y) + 0 * F.scaled_dot_product_attention(y[None], y[None], y[None], dropout_p=v).sum()

    return _leaving("v", [0.9, 0.5, 0.5, 1.5, 0.9, 0.5], loss, {3: RuntimeError})


@more
def quotient_by_nothing_in_the_backward_of_a_function() -> Made:
    held = {"n": 1.0}

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            try:
                return g * (1 / held["n"])
            except ZeroDivisionError:
                return g * 3

    values = [1.0, 2.0, 4.0, 0.0, 0.5, 0.0]
    return train(lambda m, b: F.mse_loss(Scaled.apply(m(b[0])), b[1]), lambda i: held.update(n=values[i]))
