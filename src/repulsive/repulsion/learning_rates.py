"""Learning rates of an optimizer's parameters, which the noise of a rule depends on."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

from repulsive.errors import OptimizerError
from repulsive.repulsion.parameter_lookup import are_same


class LearningRates:
    """Map parameter ids to learning rates; the map is rebuilt only when rates or parameters change.

    Args:
        optimizer: the optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters: list[list[Tensor]] = []
        self._ids: list[list[int]] = []  # ids of the parameters of each parameter group
        self._rates: list[float] = []
        self._by_id: dict[int, float] = {}

    def current(self, rule_name: str) -> dict[int, float]:
        """Return the learning rate of each parameter id. The caller must not change the map.

        Args:
            rule_name: name of the rule, for an error message.

        Raises:
            OptimizerError: a parameter has no learning rate.
        """
        entries = self._optimizer.param_groups
        try:
            rates = [float(entry["lr"]) for entry in entries]
        except (KeyError, TypeError) as error:
            raise OptimizerError(
                f"{type(self._optimizer).__name__} has parameters without a learning rate (lr), which the noise of "
                f"{rule_name} depends on; give it one, or choose a rule without noise"
            ) from error
        parameters = [entry["params"] for entry in entries]
        is_new = not are_same(parameters, self._parameters)
        if is_new:
            self._parameters = [[*some] for some in parameters]
            self._ids = [[id(parameter) for parameter in some] for some in parameters]
        if is_new or rates != self._rates:
            self._rates, self._by_id = rates, {}
            for ids, rate in zip(self._ids, rates, strict=True):
                self._by_id |= dict.fromkeys(ids, rate)
        return self._by_id
