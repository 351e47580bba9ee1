"""Mixtures of experts as a GPU runs them: a row's norm, four launches, and the next norm adds up what they found."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.errors import ConfigError
from slipstream.kernels.cpu.linear import Matrix
from slipstream.kernels.gpu.device_rows import DeviceRows
from slipstream.kernels.gpu.expert_mixture import ExpertStack, Gate, Mixture, Routing, RoutingRule, new_scores
from slipstream.kernels.gpu.kernel_set import GpuKernels
from slipstream.kernels.gpu.matrices import GpuMatrix, joined_in_order
from slipstream.models.gemma4 import gelu
from slipstream.models.moe import Experts, MoeBlock, Router


class GpuExperts:
    """A layer's routed experts; with `shared_gate`, the router's product also says how much the shared one counts."""

    def __init__(
        self, kernels: GpuKernels, router: Router, experts: Experts, shared_gate: Matrix | None = None
    ) -> None:
        shape = router.shape
        self._kernels = kernels
        self._bias = router.bias
        self._gate_up, self._down = cast(ExpertStack, experts.gate_up), cast(ExpertStack, experts.down)
        self._gate = _gate(experts)
        parts = [router.matrix] if shared_gate is None else [router.matrix, shared_gate]
        self._scores = joined_in_order(cast(list[GpuMatrix], parts))
        self._rule = RoutingRule(
            shape.experts,
            shape.active,
            shape.scores == "sigmoid",
            shape.renormalise,
            shape.scale,
            shape.router_softcap,
            shape.shared_size > 0,
            shared_gate is not None,
            experts.has_shared,
        )
        weights = self._down.weights
        self._counts = self._rule.new_counts(weights.device if isinstance(weights, Tensor) else weights.words.device)

    def __call__(
        self,
        router_rows: Tensor,
        expert_rows: Tensor,
        rows: DeviceRows,
        scratch_place: int,
        expert_scale: Tensor | None = None,
        extra: Tensor | None = None,
    ) -> Mixture:
        """What the experts make of rows; `extra` is what the shared one does where it stands apart.

        Shares are also multiplied by the `expert_scale` of their experts. Whoever adds the answers up sets back what
        the choice has counted, so that every mixture is to be added up once.
        """
        kernels = self._kernels
        logits = new_scores(self._scores, router_rows.shape[0], expert_rows.device)
        kernels.score(self._scores, router_rows, logits)
        routing = Routing.empty(self._rule, rows.rows, self._counts)
        kernels.route(logits, self._bias, expert_scale, rows.places, scratch_place, routing)
        try:
            answers = self._answers(expert_rows, routing)
        except BaseException:  # most likely there is no memory for them, and nobody will add them up
            self._counts.zero_()
            raise
        return Mixture(answers, routing, extra, rows.places, scratch_place)

    def _answers(self, rows: Tensor, routing: Routing) -> Tensor:
        """What every pair's expert says, in fp32."""
        pairs, kernels = routing.most_pairs, self._kernels
        inner = rows.new_empty(pairs, self._down.inputs)
        kernels.expert_gate_up(self._gate_up, rows, routing, self._gate, inner)
        answers = torch.empty(pairs, self._down.outputs, device=rows.device)
        kernels.expert_down(self._down, inner, routing, answers)
        return answers


class GpuMoe:
    """What stands in the place of an MLP: routed experts and perhaps one that every row passes."""

    def __init__(self, kernels: GpuKernels, block: MoeBlock) -> None:
        self._kernels = kernels
        self._block = block
        self._experts = GpuExperts(kernels, block.router, block.experts, block.shared_gate)

    def __call__(self, normed: Tensor, rows: DeviceRows, scratch_place: int) -> Mixture:
        return self._experts(normed, normed, rows, scratch_place, extra=self._shared(normed))

    def _shared(self, normed: Tensor) -> Tensor | None:
        """What the shared expert makes of the rows; None: there is none, or it stands among the others."""
        block, kernels = self._block, self._kernels
        if block.shared_gate_up is None or block.shared_down is None:
            return None
        gate_up = kernels.multiply(block.shared_gate_up, normed)
        inner = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        kernels.silu_mul(gate_up, None, inner)
        return kernels.multiply(block.shared_down, inner)


def _gate(experts: Experts) -> Gate:
    if experts.activation is F.silu:
        return "silu"
    if experts.activation is gelu:
        return "gelu"
    raise ConfigError("experts with this activation do not run on a GPU yet", "use --device cpu")
