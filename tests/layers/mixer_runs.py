"""Outputs and gradients of a recurrent mixer, at a level of activation memory."""

from liger_models.layers.recompute.activation_memory import keep_recipes, recompute


def results(mixer, x, dy, sequences, keeping):
    mixer.zero_grad()
    x = x.detach().requires_grad_()
    if keeping == "checkpoint":
        y = recompute(mixer, x, sequences)
    elif keeping == "lean":
        with keep_recipes():
            y = mixer(x, sequences)
    else:
        y = mixer(x, sequences)
    y.backward(dy)
    return {"y": y.detach(), "x": x.grad} | {name: p.grad for name, p in mixer.named_parameters()}
