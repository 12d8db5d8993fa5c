"""GRPO in a plain loop: a model with fresh weights learns to follow instructions from rewards alone.

    python examples/grpo_in_a_loop.py

A question is [digit, times, :]; the right answer repeats the digit that many times and fills up with dots.
The model is never shown an answer: its own are checked, and the reward is the share of its six places that
are right. Eight answers to each question are sampled, and each is compared with its group.
"""

import argparse

import torch

import liger_models
from liger_models.losses import PolicyOptions, group_advantages, grpo_loss

LENGTH, GROUP, QUESTIONS = 6, 8, 16
COLON, DOT = 10, 11
SHAPE = {
    "model_type": "llama",
    "vocab_size": 12,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
    "rope_theta": 1000.0,
    "tie_word_embeddings": False,
}


def main(steps: int = 150, updates: int = 2, seed: int = 0) -> list[float]:
    torch.manual_seed(seed)
    model = liger_models.from_config(SHAPE, device="cuda" if torch.cuda.is_available() else "cpu")
    optimizer = liger_models.optim.AdamW(model.parameters(), lr=2e-3)
    rewards: list[float] = []
    for step in range(steps):
        questions = ask().repeat_interleave(GROUP, 0).to(model.device)
        ids = model.eval().generate(questions, LENGTH, temperature=1.0, eos_token_id=(), seed=step)
        reward = check(questions, ids[:, 3:])
        advantages = group_advantages(reward, GROUP)
        labels = ids.clone()
        labels[:, :3] = -100
        with torch.no_grad():
            old = model.score(ids, labels).log_probs
        for _ in range(updates):
            log_probs = model.train().score(ids, labels).log_probs
            options = PolicyOptions(loss_type="grpo")
            grpo_loss(
                log_probs, advantages, labels[:, 1:] != -100, options, old_log_probs=old
            ).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        rewards.append(reward.mean().item())
        if step % 10 == 0 or step == steps - 1:
            answer = "".join("0123456789:."[i] for i in ids[0])
            print(f"step {step}: reward {rewards[-1]:.2f}, such as {answer}", flush=True)
    return rewards


def ask() -> torch.Tensor:
    """[QUESTIONS, 3]: a digit, how often it is wanted (1 to 6), and a colon."""
    digits, times = torch.randint(10, (QUESTIONS,)), torch.randint(1, LENGTH + 1, (QUESTIONS,))
    return torch.stack([digits, times, torch.full_like(digits, COLON)], 1)


def check(questions: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """The share of an answer's places that are right, [N]."""
    digits, times = questions[:, :1], questions[:, 1:2]
    wanted = torch.where(torch.arange(LENGTH, device=answers.device) < times, digits, DOT)
    return (answers == wanted).float().mean(1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=150)
    main(parser.parse_args().steps)
