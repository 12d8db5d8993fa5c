"""A causal language model: embeddings, blocks, a final norm and a head.

input_ids [batch, seq] -> tokens [T] -> hidden [T, H] -> blocks -> norm -> head -> loss, or logits [batch,
seq, V]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from liger_models.layers.attention.backends import AttentionBackend
from liger_models.layers.model.call_checks import CallChecks, batch_shape, refuse_unknown
from liger_models.layers.model.decoder import Decoder
from liger_models.layers.model.distilling import Distilling
from liger_models.layers.model.freezing import divides_projections, freeze
from liger_models.layers.model.head import LMHead, LogitForm
from liger_models.layers.model.indexer_loss import add_indexer_loss, begin_indexer_loss, train_indexers
from liger_models.layers.model.mtp import MTPCall
from liger_models.layers.model.output import ModelOutput
from liger_models.layers.model.parameters import (
    ModelParameters,
    drop_tied_head,
    restore_tied_head,
    tie_again,
)
from liger_models.layers.model.request import Request
from liger_models.layers.model.routed_experts import RoutedExperts
from liger_models.layers.model.scoring import Scoring
from liger_models.layers.parts.fresh_weights import note_fresh_weights
from liger_models.layers.parts.head_layers import make_head_layers
from liger_models.layers.recompute.eager import not_compiled
from liger_models.layers.recompute.host_weights import device_of
from liger_models.layers.sequences.agreement import groups_of_step, refusing_together
from liger_models.layers.sequences.cache import KVCache
from liger_models.layers.sequences.router_loss import router_loss
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.specs import ModelSpec
from liger_models.layers.vision.grid_inputs import seconds_as_numbers


class CausalLM(Scoring, Distilling, Decoder, ModelParameters):
    """Embeddings, blocks, a final norm and a head.

    Args:
        spec: the model's specification.
        attention: the attention backend, see layers/attention/backends.py.
        activation_memory: level for all layers, or one per layer, see layers/recompute/activation_memory.py.
        memory_budget: for the level "auto", see layers/memory/.
    """

    sequence_group: Any = None  # ranks that divide each batch: layers/sequences/sequence_parallel.py

    def __init__(
        self,
        spec: ModelSpec,
        attention: AttentionBackend = "auto",
        activation_memory: str | Sequence[str] = "lean",
        memory_budget: float | str | None = None,
    ):
        super().__init__()
        self.make_decoder(spec, attention)
        self.head_layers = make_head_layers(spec.hidden_size, spec.head_layers)
        self.lm_head = LMHead(spec.hidden_size, spec.vocab_size, spec.head_bias, spec.float32_head)
        self.logit_form = LogitForm.of(spec)
        self.tie_weights()
        note_fresh_weights(self, spec.fresh)
        if spec.tie_word_embeddings:
            self.register_state_dict_post_hook(drop_tied_head)
            self.register_load_state_dict_pre_hook(restore_tied_head)
            self.register_load_state_dict_post_hook(tie_again)
        self.note_canonical_forms()
        self.set_activation_memory(activation_memory, memory_budget)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, with the seconds of videos converted to numbers: `seconds_as_numbers`."""
        return super().__call__(*args, **seconds_as_numbers(kwargs))

    @not_compiled
    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        parents: Sequence[int] | Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        logits_to_keep: int | Tensor = 0,
        return_logits: bool | None = None,
        output_hidden_states: bool | None = None,
        mtp_weight: float | None = None,
        indexer_weight: float | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> ModelOutput | tuple[Any, ...]:
        """Compute the loss with labels, logits without, or scores of labels on request.

        Args:
            input_ids: [batch, seq] integers; or `inputs_embeds` [batch, seq, H] instead, or both if layers
                have per-id inputs (Gemma 4's small models).
            labels: [batch, seq], aligned with the input and shifted internally; -100, padding, and the first
                token of a document do not count.
            attention_mask: [batch, seq], 0 at padding.
            position_ids: [batch, seq]; the default counts from 0 in every row, or in every document of
                `cu_seqlens`. With three-axis positions, as for Qwen's images, also [3, batch, seq], or [4,
                batch, seq] with token positions first; by default they follow from the images.
            cu_seqlens: [n + 1] integers, the boundaries of packed documents in the flattened batch: documents
                neither attend to nor predict each other. A CPU tensor avoids a synchronisation.
            parents: [n] integers, index of the document that each document continues, or -1: it attends to
                that one as its prefix, and positions continue. [2, n]: the second row is the length of that
                prefix. See layers/sequences/tree.py.
            shift_labels: [batch, seq], already shifted: position t predicts shift_labels[:, t]. (Not in the
                signature: trainers require every parameter with "label" in its name.)
            score: `ScoreOptions`: return the scores of the labels instead of the loss, as `score` does; also
                not in the signature.
            distill: `Distillation`: return a distillation loss, as `distill` does.
            routed_experts: [batch, seq, layers, top_k] integers: experts to use instead of the routers' own
                choice, and output_routed_experts: return them (layers/model/routed_experts.py). Not in the
                signature either.
            num_items_in_batch: divisor of the summed loss instead of the label count (exact gradient
                accumulation). Router losses are weighted by this call's share of labels, so that a step's
                parts add up to their mean.
            logits_to_keep: compute logits of only this many last positions, or of these positions; 0: all.
            return_logits: also return logits with the loss. Default: only without labels.
            output_hidden_states: also return the input of each layer and the output of the final norm,
                [batch, seq, H] each and zero at padding. They are part of the graph, at every level of
                activation memory, so that `retain_grad` and losses on them work.
            mtp_weight: of the loss of multi-token prediction (layers/model/mtp.py), which is added to the
                loss; requires a model loaded with `mtp=True`.
            indexer_weight: of the loss of the indexers (layers/model/indexer_loss.py), which is added to the
                loss; requires `train_indexers`.
            return_dict: False returns the output's entries as a tuple.
            pixel_values, input_features and other keywords: outputs of the processor of a family with
                encoders.
            others: keywords of other libraries' models are accepted if they request nothing: None and False.

        Returns:
            A dict with `loss` (float32 scalar), `logits` ([batch, seq, V], zero at padding) and
            `hidden_states` as requested; with `mtp_weight` also `mtp_loss`, and with
            `indexer_weight` also `indexer_loss`, without the weights and gradients.

        Raises:
            DataError: shapes that do not fit, ids or labels outside the vocabulary, no label in the batch,
                positions beyond the rotary tables, a num_items_in_batch that is not positive; or another
                process of the training step refused its batch.
            TypeError: an unsupported keyword, or hidden states or `mtp_weight` together with scores.
        """
        request = Request.take(others, labels, num_items_in_batch)
        routes = RoutedExperts.take(others)
        if request.teaching is not None:
            hidden = self.for_head(self.hidden_states(request.teaching.sequences, input_ids))
            return request.teach(self.lm_head, self.logit_form, hidden)
        groups, own_device = groups_of_step(self), device_of(self)
        with refusing_together(groups, own_device):
            media = self.take_media(others)
            refuse_unknown(others)
            width = self.spec.hidden_size
            shape, device = batch_shape(input_ids, inputs_embeds, width, ids_needed=self.needs_ids)
            request.check_score(shape[0], cu_seqlens, return_logits)
            if request.score is not None and output_hidden_states:
                raise TypeError("score takes no output_hidden_states; call the model again for them")
            sequences = Sequences.from_call(shape, device, attention_mask, position_ids, cu_seqlens, parents)
            targets = request.targets(sequences)
            further = None
            if mtp_weight is not None:
                scored = request.score is not None
                further = MTPCall(mtp_weight, self.mtp, targets, sequences, scored)
            if indexer_weight is not None:
                begin_indexer_loss(self, indexer_weight, targets, sequences, request.score is not None)
            sequences = sequences.divided(self.sequence_group)
            self.prepare_call(sequences, input_ids, media)
            request = request.packed(sequences)
            refusal = routes.begin(self.layers, sequences)
            checks = request.checks(input_ids, targets, self.spec, sequences, groups, own_device)
        self.begin_checks(checks, media, refusal)
        inner: list[Tensor] | None = [] if output_hidden_states else None
        embedded = None if further is None else further.embedded
        hidden = self.run_layers(sequences, input_ids, inputs_embeds, inner, media, embedded)
        if inner is not None:
            inner.append(sequences.unpack(hidden))
            hidden = sequences.pack(inner[-1])  # so the returned tensor has the loss's gradient
        hidden = self.for_head(hidden)
        checks.finish()

        own = None if targets is None else sequences.own(targets)
        output = request.compute(self.lm_head, self.logit_form, hidden, own, checks, sequences, input_ids)
        added = None if targets is None else self._router_loss(request, checks.num_valid, sequences)
        output = request.complete(output, sequences, added)
        if routes.wanted:
            output["routed_experts"] = routes.used(self.layers, sequences)
        if return_logits or (return_logits is None and targets is None):
            output["logits"] = self._logits(hidden, sequences, logits_to_keep)
        if inner is not None:
            output["hidden_states"] = tuple(inner)
        if indexer_weight is not None:
            share = checks.num_valid / request.divisor(checks.num_valid)
            add_indexer_loss(output, indexer_weight, share, sequences)
        if further is not None:
            level, divisor = self.layers[-1].activation_memory, request.divisor(checks.num_valid)
            further.add_to(output, self.lm_head, self.logit_form, hidden, level, divisor)
        return output.to_tuple() if return_dict is False else output

    def _router_loss(self, request: Request, num_valid: int, sequences: Sequences) -> Tensor | None:
        """Contribution of the routers to the loss for a rank's share; None if there is none."""
        if self.spec.router is None:
            return None
        added = router_loss(sequences.notes.router_logits.take(), self.spec.router, sequences.slice)
        if request.score is not None:
            return added
        # Weight a part of a divided step by its share of labels, so that the parts sum to the step.
        return added * (num_valid / request.divisor(num_valid))

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits [..., V] of hidden states [..., H] from `hidden_states`."""
        return self._projected(self.for_head(hidden))

    def for_head(self, hidden: Tensor) -> Tensor:
        """The input of the head's projection, [..., H], of hidden states [..., H] from `hidden_states`."""
        return hidden if self.head_layers is None else self.head_layers(hidden)

    def _projected(self, hidden: Tensor) -> Tensor:
        return self.logit_form(self.lm_head(hidden))

    def freeze(self, *patterns: str, train_only: Sequence[str] = ()) -> None:
        """Freeze the parameters whose checkpoint names match a pattern, and train all others; with
        `train_only`, only those that match one of these. Without any pattern, train all.

        A pattern is a glob over a name or any part of it between dots, with ranges of numbers
        ("embed_tokens", "layers.0-15", "layers.3?.mlp", "q_proj"), or a part of a multimodal model:
        "vision", "audio", "projector", "language"; or "mtp", the modules for multi-token prediction. Create
        the optimizer afterwards.

        Raises:
            ValueError: a pattern that matches nothing, with near names; or one that divides the tensors of a
                fused projection, which needs projections="split".
        """
        freeze(self, self.weight_map(), patterns, train_only, **self._freezing())

    def train_indexers(self, enabled: bool = True) -> None:
        """Train the indexers of layers that attend to chosen keys, or freeze them again: the loss of
        `indexer_weight` alone reaches them. Call `freeze` and create the optimizer afterwards.

        Raises:
            ValueError: no layer has an indexer.
        """
        train_indexers(self, enabled)

    def freezing_divides_projections(self, *patterns: str, train_only: Sequence[str] = ()) -> bool:
        """Whether `freeze` with these arguments needs split projections.

        Raises:
            ValueError: a pattern that matches nothing.
        """
        return divides_projections(self, self.weight_map(), patterns, train_only, **self._freezing())

    def _freezing(self) -> dict[str, Any]:
        tied = self.layout.name("lm_head.weight") if self.spec.tie_word_embeddings else None
        return {"parts": self.parts(), "tied": tied}

    def check_ids(self, input_ids: Tensor) -> None:
        """Check [batch, seq] ids as `forward` does, but immediately (synchronises the device).

        Raises:
            DataError: they are not integers of this shape, or one is outside the vocabulary.
        """
        batch_shape(input_ids, None, self.spec.hidden_size)
        checks = CallChecks(input_ids, None, self.spec.num_ids)
        checks.begin()
        checks.finish()

    def new_cache(self, batch: int, max_length: int) -> KVCache:
        """Empty cache for generation from `batch` sequences of up to `max_length` tokens."""
        weight = self.embed_tokens.weight
        device = device_of(self)
        kind = device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        size = (batch, max_length, device, dtype)
        tokens, states = zip(*(layer.new_cache(*size) for layer in self.layers), strict=True)
        return KVCache(list(tokens), batch, device, list(states))

    def _logits(self, hidden: Tensor, sequences: Sequences, logits_to_keep: int | Tensor) -> Tensor:
        if isinstance(logits_to_keep, int) and logits_to_keep == 0:
            return sequences.unpack(self._projected(hidden))
        rows = sequences.unpack(hidden)
        rows = rows[:, -logits_to_keep:] if isinstance(logits_to_keep, int) else rows[:, logits_to_keep]
        return self._projected(rows)
