"""Post-training losses: functions of the scores of `model.score`, each with its formula and source.

May import only kernels, the batch (`layers.sequences`) and the specs; training objectives import it.
"""

from liger_models.losses.agreement import Agreement, agreement
from liger_models.losses.cpo_loss import cpo_loss
from liger_models.losses.dpo_loss import PreferenceLoss, dpo_loss, wpo_weights
from liger_models.losses.grpo_loss import PolicyLoss, PolicyOptions, grpo_loss
from liger_models.losses.info_nce_loss import info_nce_loss
from liger_models.losses.kl_estimate import kl_estimate
from liger_models.losses.kto_loss import KTOLoss, kto_kl, kto_loss
from liger_models.losses.orpo_loss import orpo_loss
from liger_models.losses.policy import (
    group_advantages,
    on_policy,
    rloo_advantages,
    sampler_ratio,
    top_entropy,
)
from liger_models.losses.reference import reference_log_probs, without_adapters
from liger_models.losses.reward_loss import reward_loss
from liger_models.losses.rloo_loss import rloo_loss
from liger_models.losses.rows import rows_of_documents, sequence_log_probs
from liger_models.losses.sft_loss import sft_loss
from liger_models.losses.shared_prompts import SharedPrompts, shared_prompts
from liger_models.losses.simpo_loss import simpo_loss
from liger_models.losses.value_loss import value_loss

__all__ = [
    "Agreement",
    "KTOLoss",
    "PolicyLoss",
    "PolicyOptions",
    "PreferenceLoss",
    "SharedPrompts",
    "agreement",
    "cpo_loss",
    "dpo_loss",
    "group_advantages",
    "grpo_loss",
    "info_nce_loss",
    "kl_estimate",
    "kto_kl",
    "kto_loss",
    "on_policy",
    "orpo_loss",
    "reference_log_probs",
    "reward_loss",
    "rloo_advantages",
    "rloo_loss",
    "rows_of_documents",
    "sampler_ratio",
    "sequence_log_probs",
    "sft_loss",
    "shared_prompts",
    "simpo_loss",
    "top_entropy",
    "value_loss",
    "without_adapters",
    "wpo_weights",
]
