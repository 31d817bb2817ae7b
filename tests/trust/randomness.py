"""Random numbers of Python and numpy in the loss. Torch's own are drawn from other bits by design, so none matter here."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from tests.trust.case import Made, Net, at, cases_of, mse, train
from torch import nn

case, more = cases_of("randomness")


@case
def random_number() -> Made:
    return train(lambda m, b: mse(m, b) * (0.5 + random.random()))


@case
def random_branch() -> Made:
    class Model(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.a(x)
            return self.b(torch.tanh(h) if random.random() < 0.5 else torch.relu(h))

    return train(model=Model())


@more
def random_integer() -> Made:
    return train(lambda m, b: mse(m, b) * random.randint(1, 4))


@more
def random_choice_of_a_layer() -> Made:
    model = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))
    return train(lambda m, b: mse(random.choice(list(m)), b), model=model)


@more
def random_order_of_layers() -> Made:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.head = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            order = [0, 1, 2]
            random.shuffle(order)
            for i in order:
                x = torch.tanh(self.layers[i](x))
            return self.head(x)

    return train(model=Model())


@more
def layers_dropped_at_random() -> Made:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.head = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                if random.uniform(0, 1) > 0.5:
                    x = x + torch.tanh(layer(x))
            return self.head(x)

    return train(model=Model())


@case
def random_generator_of_ones_own() -> Made:
    source = random.Random(3)
    return train(lambda m, b: mse(m, b) * (0.5 + source.random()), state=lambda: source.getstate()[1][-1])


@case
def random_seeded_in_the_loss() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        random.seed(5)
        return mse(m, b) * (0.5 + random.random())

    return train(loss)


@more
def random_seeded_between_steps() -> Made:
    return train(lambda m, b: mse(m, b) * (0.5 + random.gauss(0, 0.1)), lambda i: random.seed(i % 2))


@more
def random_drawn_between_steps() -> Made:
    """The loop draws from the same generator as the loss, in between."""
    drawn: list[float] = []
    return train(
        lambda m, b: mse(m, b) * (0.5 + random.random()), lambda i: drawn.append(random.random()), state=lambda: drawn
    )


@case
def random_drawn_between_steps_only() -> Made:
    """A whole step leaves the generators of Python and numpy alone when the loss draws nothing."""
    drawn: list[float] = []
    return train(change=lambda i: drawn.extend([random.random(), float(np.random.rand())]), state=lambda: drawn)


@case
def numpy_random_number() -> Made:
    return train(lambda m, b: mse(m, b) * (0.5 + np.random.rand()))


@case
def numpy_mixing_coefficient() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        share = float(np.random.beta(0.4, 0.4))
        return mse(m, (share * b[0] + (1 - share) * b[0].flip(0), share * b[1] + (1 - share) * b[1].flip(0)))

    return train(loss)


@case
def numpy_generator() -> Made:
    source = np.random.default_rng(3)
    return train(lambda m, b: mse(m, b) * (0.5 + source.random()))


@more
def numpy_permutation_of_rows() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        rows = torch.from_numpy(np.random.permutation(len(b[0])))[:4]
        return mse(m, (b[0][rows], b[1][rows]))

    return train(loss)


@more
def numpy_random_state() -> Made:
    source = np.random.RandomState(3)
    return train(lambda m, b: mse(m, b) * (0.5 + source.uniform()))


@case
def torch_draw_without_effect() -> Made:
    """A permutation of rows changes no mean."""
    return train(lambda m, b: mse(m, tuple(part[torch.randperm(8)].sort(0).values for part in b)))


@case
def torch_generator_in_the_loop() -> Made:
    """Noise drawn outside the step, by a generator of one's own, comes in through a tensor of the closure."""
    source, noise = torch.Generator().manual_seed(4), torch.zeros(8, 6)
    change = lambda i: noise.normal_(generator=source)  # noqa: E731
    return train(lambda m, b: mse(m, (b[0] + 0.1 * noise, b[1])), change)


@more
def probability_of_a_random_branch_changes() -> Made:
    options = {"forced": 1.0}
    loss = lambda m, b: mse(m, b) * (1.0 if random.random() < options["forced"] else 0.1)  # noqa: E731
    return train(loss, at(2, options.update, forced=0.5))
