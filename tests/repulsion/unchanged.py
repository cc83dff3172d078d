"""Copies of weights and hooks of an optimizer, to check that nothing has changed."""


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def untouched(optimizer):
    return not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
