"""The shape of a network: what the MLP ops compile for, and where its parameters lie."""

from dataclasses import dataclass
from functools import cached_property

WIDEST = 512
DEEPEST = 8


def round_up(count, multiple):
    """The next multiple of `multiple`."""
    return -(-count // multiple) * multiple


@dataclass(frozen=True)
class Layer:
    """One linear layer. Offsets are in elements of the flat parameters and of a stored row."""

    tower: int
    fan_in: int
    fan_out: int
    weight: int  # offset of [fan_out, fan_in], row-major, in the parameters
    bias: int  # offset of [fan_out] in the parameters
    column: int  # first column of its output: in the hidden row, or in the output row for a head
    source: int  # first hidden column of its input, -1 for the network's input
    head: bool


@dataclass(frozen=True)
class Network:
    """One or two multilayer perceptrons over the same input row.

    Args:
        inputs: columns of a stored input row, a multiple of 8 in 8..512.
        towers: one or two tuples of layer widths; all but the last of a tuple are hidden layers,
            multiples of 8 in 8..512; the last is the head, 1..512. 1 to 8 layers each.
        activation: "relu" or "tanh", after every hidden layer.

    Raises:
        ValueError: a width or depth outside these ranges, with the number.
    """

    inputs: int
    towers: tuple
    activation: str = "relu"

    def __post_init__(self):
        object.__setattr__(self, "towers", tuple(tuple(map(int, t)) for t in self.towers))
        _refuse(self.inputs, "inputs", 8)
        if len(self.towers) not in (1, 2):
            raise ValueError(f"a network has 1 or 2 towers, got {len(self.towers)}")
        for widths in self.towers:
            if not 1 <= len(widths) <= DEEPEST:
                raise ValueError(f"a tower has 1 to {DEEPEST} layers, got {len(widths)}")
            for width in widths[:-1]:
                _refuse(width, "a hidden layer", 8)
            _refuse(widths[-1], "a head", 1)
        if sum(t[-1] for t in self.towers) > WIDEST:
            raise ValueError(f"heads must be at most {WIDEST} wide together")
        if self.activation not in ("relu", "tanh"):
            raise ValueError(f"activation must be 'relu' or 'tanh', got {self.activation!r}")

    @cached_property
    def layers(self):
        """Every layer, towers in order, inputs to head."""
        made, offset, hidden, output = [], 0, 0, 0
        for tower, widths in enumerate(self.towers):
            fan_in, source = self.inputs, -1
            for depth, fan_out in enumerate(widths):
                head = depth == len(widths) - 1
                weight = offset
                bias = weight + round_up(fan_out * fan_in, 8)
                offset = bias + round_up(fan_out, 8)
                column = output if head else hidden
                made.append(Layer(tower, fan_in, fan_out, weight, bias, column, source, head))
                if head:
                    output += fan_out
                else:
                    fan_in, source, hidden = fan_out, hidden, hidden + fan_out
        return tuple(made)

    @cached_property
    def parameters(self):
        """Length of the flat parameter vector."""
        last = self.layers[-1]
        return last.bias + round_up(last.fan_out, 8)

    @cached_property
    def hidden(self):
        """Columns of a row of stored hidden activations; at least 8, so the array is never empty."""
        return max(8, sum(sum(t[:-1]) for t in self.towers))

    @cached_property
    def outputs(self):
        """Columns of an output row: the heads side by side, then zero columns to a multiple of 8."""
        return round_up(sum(t[-1] for t in self.towers), 8)

    def views(self, parameters):
        """(layer, weight [fan_out, fan_in], bias [fan_out]) of each layer, as views."""
        for layer in self.layers:
            weight = parameters[layer.weight : layer.weight + layer.fan_out * layer.fan_in]
            bias = parameters[layer.bias : layer.bias + layer.fan_out]
            yield layer, weight.reshape(layer.fan_out, layer.fan_in), bias


def policy_network(observation, actions, hidden=(256, 128, 64), activation="relu", shared=True):
    """A network for a discrete policy and its value: logits in columns [0, actions), then V.

    Args:
        observation: columns of a stored observation row, a multiple of 8.
        actions: number of discrete actions.
        hidden: widths of the hidden layers.
        shared: one trunk for both, or an actor and a critic of the same widths.
    """
    if shared:
        return Network(observation, ((*hidden, actions + 1),), activation)
    return Network(observation, ((*hidden, actions), (*hidden, 1)), activation)


def _refuse(width, what, least):
    if not least <= width <= WIDEST or width % least:
        raise ValueError(f"{what} must be a multiple of {least} in {least}..{WIDEST}, got {width}")
