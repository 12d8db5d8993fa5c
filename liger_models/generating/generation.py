"""Token-by-token text generation with a key/value cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from liger_models.convert.checkpoints.shards import is_sharded
from liger_models.convert.errors import DataError, UnsupportedModelError
from liger_models.generating.decoding import Decoding, can_be_recorded
from liger_models.layers.model.call_checks import check_ids, refuse_unknown
from liger_models.layers.model.causal_lm import CausalLM
from liger_models.layers.sequences.documents import Documents
from liger_models.layers.sequences.positions import Positions
from liger_models.layers.sequences.rotary import effective_length
from liger_models.layers.sequences.sequences import Sequences
from liger_models.layers.sequences.visibility import Visibility

LOOK_EVERY = 8  # tokens: checking whether all sequences have ended synchronises the GPU
WORTH_RECORDING = 8  # tokens: roughly the cost of capturing a step


@torch.no_grad()
def generate(
    model: CausalLM,
    input_ids: Tensor,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    *,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    attention_mask: Tensor | None = None,
    eos_token_id: int | Iterable[int] | None = None,
    pad_token_id: int | None = None,
    seed: int | None = None,
    on_token: Callable[[Tensor], Tensor | None] | None = None,
    **images: Any,
) -> Tensor:
    """Continue each prompt of a batch.

    Args:
        model: the model.
        input_ids: [batch, seq] prompts.
        max_new_tokens: maximum number of new tokens.
        temperature: divides the logits before sampling; 0 is greedy.
        top_p: sample from the smallest set of tokens with at least this total probability.
        top_k: sample from the k likeliest tokens; 0: from all.
        min_p: leave out tokens with less than this share of the likeliest token's probability (Nguyen et
            al., 2024, arXiv:2407.01082).
        repetition_penalty: divides the positive logits of all tokens of the prompt and the continuation, and
            multiplies the negative ones (Keskar et al., 2019, arXiv:1909.05858); 1: no penalty.
        attention_mask: [batch, seq], 0 at padding (on either side).
        eos_token_id: one id or several that end a sequence.
        pad_token_id: fills sequences that end before others; default: the end token.
        seed: for sampling; None uses torch's global generator.
        on_token: called with the new tokens, [batch] on the device, after each step. It may return which
            sequences end here, [batch] booleans, such as those that contain a stop string.
        images: outputs of a vision-language model's processor other than ids (`pixel_values` and others).

    Returns:
        [batch, seq + new]: prompts and continuations.

    Raises:
        DataError: an empty prompt, ids outside the vocabulary, or more positions than the model's rotary
            tables hold.
        UnsupportedModelError: the model is sharded over processes.
        ValueError: an option outside its range.
        TypeError: an unknown keyword, or text instead of ids.
    """
    _check_options(max_new_tokens, temperature, top_p, top_k, min_p, repetition_penalty)
    _check_call(input_ids, images)
    ends = [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id or ())
    end_ids = torch.tensor(ends, dtype=torch.long, device=input_ids.device)
    pad = pad_token_id if pad_token_id is not None else (ends[0] if ends else 0)
    generator = None
    if seed is not None:
        generator = torch.Generator(device=input_ids.device).manual_seed(seed)

    _check_prompts(model, input_ids, attention_mask)
    if model.spec.is_bidirectional:
        raise UnsupportedModelError(
            "this model's attention is bidirectional, as in embedding models, and cannot generate text"
        )
    batch, seq = input_ids.shape
    room = seq + max_new_tokens
    step: Decoding | None = None
    recorded = max_new_tokens > WORTH_RECORDING and can_be_recorded(model)
    # Nothing is reported to on_token after the end.
    look_every = LOOK_EVERY if input_ids.is_cuda and on_token is None else 1
    done = torch.zeros(batch, dtype=torch.bool, device=input_ids.device)
    tokens = [input_ids]
    seen = None if repetition_penalty == 1.0 else _seen(input_ids, attention_mask, model.spec.vocab_size)
    with in_evaluation(model):
        for number in range(1, max_new_tokens + 1):
            if step is None or _tables(model, step.cache.longest) != _tables(model, step.cache.longest + 1):
                # The prompts; or a length that needs other rotary tables for all keys, cached ones included.
                ids = torch.cat(tokens, dim=1)
                step, logits = _begin(model, ids, attention_mask, room, recorded, images)
            else:
                logits = step(tokens[-1][:, 0])
            logits = logits.float()
            if seen is not None:
                penalised = torch.where(logits > 0, logits / repetition_penalty, logits * repetition_penalty)
                logits = torch.where(seen, penalised, logits)
            chosen = _choose(logits, temperature, top_p, top_k, generator, min_p)
            chosen = torch.where(done, pad, chosen)
            if seen is not None:
                seen.scatter_(1, chosen[:, None], True)
            tokens.append(chosen[:, None])
            ended = None if on_token is None else on_token(chosen)
            if ended is not None:
                done = done | ended.to(done)
            if ends or ended is not None:
                done = done | torch.isin(chosen, end_ids)
                if number % look_every == 0 and bool(done.all()):
                    break
    text = torch.cat(tokens, dim=1)
    return _up_to_the_end(text, seq, end_ids) if ends and look_every > 1 else text


def _begin(
    model: CausalLM,
    ids: Tensor,
    attention_mask: Tensor | None,
    room: int,
    recorded: bool,
    images: Mapping[str, Any],
) -> tuple[Decoding, Tensor]:
    """Process all tokens [batch, seq]; returns the decoder and the first logits [batch, V]."""
    others = dict(images)
    media = model.take_media(others)
    refuse_unknown(others, "generate")
    documents, lengths = _documents(ids, attention_mask)
    cache = model.new_cache(len(ids), room)
    positions = Positions(cache.reserve(lengths, documents.max_seqlen), cache.longest)
    sequences = Sequences(Visibility(documents), positions, cache)
    hidden = model.hidden_states(sequences, ids, media=media)
    model.finish_media(media)
    return Decoding(model, cache, room, recorded), model.logits(hidden[lengths.cumsum(0) - 1])


def _up_to_the_end(text: Tensor, seq: int, end_ids: Tensor) -> Tensor:
    """[batch, seq + new] without tokens after the end of all sequences."""
    ended = torch.isin(text[:, seq:], end_ids).cumsum(1) > 0
    going_on = int((~ended).sum(1).max())
    return text[:, : seq + going_on + 1]


@contextmanager
def in_evaluation(model: torch.nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode, without the noise and load counts of experts in training."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _tables(model: CausalLM, longest: int) -> tuple[int, ...]:
    """Key of the rotary tables for a batch whose longest sequence has this length."""
    return tuple(effective_length(rope, longest) for rope in model.spec.ropes if rope.depends_on_length)


def _check_prompts(model: CausalLM, input_ids: Tensor, attention_mask: Tensor | None) -> None:
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise DataError(
            f"prompts must have the shape [batch, seq] and hold a token, found {tuple(input_ids.shape)}"
        )
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise DataError(
            f"attention_mask must have the shape of the prompts, {tuple(input_ids.shape)}; found "
            f"{tuple(attention_mask.shape)}"
        )
    if any(map(is_sharded, model.parameters())):
        raise UnsupportedModelError(
            "the model is sharded over processes, which would have to generate the same number of tokens; "
            "save it, and generate with an unsharded model"
        )
    model.check_ids(input_ids)


def _documents(ids: Tensor, attention_mask: Tensor | None) -> tuple[Documents, Tensor]:
    """Prompts and their continuations as packed documents, and their lengths [batch]."""
    batch, length = ids.shape
    if attention_mask is not None:
        added = attention_mask.new_ones(batch, length - attention_mask.shape[1])
        attention_mask = torch.cat([attention_mask, added], dim=1)
    documents = Sequences.from_call((batch, length), ids.device, attention_mask).documents
    if documents.cu_seqlens is None:
        return documents, torch.full((batch,), length, dtype=torch.long, device=ids.device)
    documents = replace(documents, gapped_extent=0)  # positions and windows count tokens only
    lengths = documents.boundaries().diff().long()
    if bool((lengths == 0).any()):
        raise DataError("a prompt of the batch is empty: its attention_mask is 0 everywhere")
    return documents, lengths


def _seen(input_ids: Tensor, attention_mask: Tensor | None, vocab_size: int) -> Tensor:
    """[batch, V]: which tokens each prompt contains."""
    counts = torch.zeros(len(input_ids), vocab_size, device=input_ids.device)
    real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    return counts.scatter_add_(1, input_ids.clamp(0, vocab_size - 1), real.to(counts)) > 0


def _choose(
    logits: Tensor,
    temperature: float,
    top_p: float,
    top_k: int,
    generator: torch.Generator | None,
    min_p: float = 0.0,
) -> Tensor:
    """Choose the next token for each row of [batch, V] logits."""
    if temperature == 0.0:
        return logits.argmax(-1)
    logits = logits / temperature
    if top_k:
        kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if top_p < 1.0:
        ordered, order = logits.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        outside = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= top_p)
        logits = logits.masked_fill(outside, float("-inf"))
    if min_p:
        shares = logits.softmax(-1)
        outside = shares < min_p * shares.amax(-1, keepdim=True)
        logits = logits.masked_fill(outside, float("-inf"))
    # torch.multinomial's algorithm without its check of the probabilities, which synchronises.
    shares = logits.softmax(-1)
    return (shares / torch.empty_like(shares).exponential_(generator=generator)).argmax(-1)


def _check_call(input_ids: Any, images: Mapping[str, Any]) -> None:
    check_ids(input_ids)
    if "do_sample" in images:
        raise TypeError("generate() has no do_sample; temperature=1.0 samples, and 0 is greedy")


def _check_options(
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
    repetition_penalty: float,
) -> None:
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, found {max_new_tokens}")
    if not temperature >= 0:
        raise ValueError(f"temperature must not be negative, found {temperature}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, found {top_p}")
    if top_k < 0:
        raise ValueError(f"top_k must not be negative, found {top_k}")
    if not 0 <= min_p <= 1:
        raise ValueError(f"min_p must be from 0 to 1, found {min_p}")
    if not 0 < repetition_penalty < float("inf"):
        raise ValueError(f"repetition_penalty must be above 0, found {repetition_penalty}")
