"""Mixtures of experts as a GPU runs them: four launches after a row's norm, and the next norm adds up the answers."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from slipstream.kernels.cpu.linear import Matrix
from slipstream.kernels.gpu.device_rows import DeviceRows
from slipstream.kernels.gpu.expert_mixture import ExpertStack, Mixture, Routing, RoutingRule, new_scores
from slipstream.kernels.gpu.kernel_set import GpuKernels
from slipstream.kernels.gpu.matrices import GpuMatrix, joined_in_order
from slipstream.models.moe import ExpertBlock, RoutedExperts


class DeviceExperts:
    """A layer's routed experts; with `shared_gate`, the router's product also says how much the shared one counts."""

    def __init__(self, kernels: GpuKernels, routed: RoutedExperts, shared_gate: Matrix | None = None) -> None:
        shape = routed.shape
        self._kernels = kernels
        self._bias = routed.router_bias
        self._gate_up, self._down = cast(ExpertStack, routed.gate_up), cast(ExpertStack, routed.down)
        self._gate = routed.activation
        parts = [routed.router] if shared_gate is None else [routed.router, shared_gate]
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
            routed.has_shared,
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
        """Returns the experts' answers to rows; `extra` is the answer of a shared expert that is stored separately.

        Shares are also multiplied by the `expert_scale` of their experts. The launch that adds up the answers sets the
        counts of the choice back to zero, so every mixture must be added up exactly once.
        """
        kernels = self._kernels
        logits = new_scores(self._scores, router_rows.shape[0], expert_rows.device)
        kernels.score(self._scores, router_rows, logits)
        routing = Routing.empty(self._rule, rows.rows, self._counts)
        kernels.route(logits, self._bias, expert_scale, rows.places, scratch_place, routing)
        try:
            answers = self._answers(expert_rows, routing)
        except BaseException:  # most likely memory ran out; no launch will add up these answers and reset the counts
            self._counts.zero_()
            raise
        return Mixture(answers, routing, extra, rows.places, scratch_place)

    def _answers(self, rows: Tensor, routing: Routing) -> Tensor:
        """Returns the answer of every pair's expert, in fp32."""
        pairs, kernels = routing.most_pairs, self._kernels
        inner = rows.new_empty(pairs, self._down.inputs)
        kernels.expert_gate_up(self._gate_up, rows, routing, self._gate, inner)
        answers = torch.empty(pairs, self._down.outputs, device=rows.device)
        kernels.expert_down(self._down, inner, routing, answers)
        return answers


class DeviceExpertBlock:
    """Routed experts in the place of an MLP, and perhaps a shared expert that every row goes through."""

    def __init__(self, kernels: GpuKernels, block: ExpertBlock) -> None:
        self._kernels = kernels
        self._shared = block.shared
        self._experts = DeviceExperts(kernels, block.routed, block.shared_gate)

    def __call__(self, normed: Tensor, rows: DeviceRows, scratch_place: int) -> Mixture:
        return self._experts(normed, normed, rows, scratch_place, extra=self._answer_of_shared(normed))

    def _answer_of_shared(self, normed: Tensor) -> Tensor | None:
        """Returns the shared expert's answer; None if there is no shared expert, or if it is among the routed ones."""
        shared, kernels = self._shared, self._kernels
        if shared is None:
            return None
        gate_up = kernels.multiply(shared.gate_up, normed)
        inner = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        kernels.silu_mul(gate_up, None, inner)
        return kernels.multiply(shared.down, inner)
