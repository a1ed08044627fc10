"""Patches of accelerate that tell when an unchanged script is in a training step."""

import functools
import types

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer


def patch(owner, name, new):
    """From now on `owner.name(...)` is `new(the old one, ...)`."""
    old = getattr(owner, name)

    @functools.wraps(old)
    def patched(*args, **options):
        return new(old, *args, **options)

    setattr(owner, name, patched)


class StepWatch:
    """Tells when a script is in a training step. A subclass says what happens then.

    A step begins with a forward pass, with gradients, of a model that `Accelerator.prepare`
    returned. It ends when the `step` of an optimizer that it returned is over, after the last
    micro-batch. What a script does between two steps, such as logging, does not count. Neither does
    `load_state`, which under FSDP steps an optimizer that has no states yet.
    """

    def __init__(self):
        self.done = 0  # steps
        self.in_step = False
        self.loading = False

    def preparing(self, accelerator, model):
        """`Accelerator.prepare` is about to prepare a model."""

    def begin(self, model):
        """A step begins with this model, as it was prepared."""

    def before_update(self, model, optimizer):
        """Gradients are reduced, and the optimizer comes next."""

    def end(self):
        """A step is over, and counted in `done`."""

    def watch(self):
        """Watch all that `Accelerator.prepare` returns from now on."""

        def prepared(prepare, accelerator, *parts, **options):
            for part in parts:
                if isinstance(part, torch.nn.Module):
                    self.preparing(accelerator, part)
            found = prepare(accelerator, *parts, **options)
            whole = found if isinstance(found, (tuple, list)) else (found,)
            models = [part for part in whole if isinstance(part, torch.nn.Module)]
            optimizers = [part for part in whole if isinstance(part, AcceleratedOptimizer)]
            for model in models:
                model.register_forward_pre_hook(self._forward, prepend=True)
            for optimizer in optimizers:
                self._follow(accelerator, models[0] if models else None, optimizer)
            return found

        def loaded(load_state, *args, **options):
            self.loading = True
            result = load_state(*args, **options)
            self.loading = False
            return result

        patch(Accelerator, "prepare", prepared)
        patch(Accelerator, "load_state", loaded)

    def _forward(self, model, _):
        if torch.is_grad_enabled() and not self.in_step:
            self.in_step = True
            self.begin(model)

    def _follow(self, accelerator, model, optimizer):
        own_step = optimizer.step
        # DeepSpeed's engine steps at the end of the backward pass, and its optimizer never does.
        engine = model if hasattr(optimizer.optimizer, "loss_scaler") else None
        update = engine.step if engine else None

        def engine_step(*args, **options):
            self.before_update(model, optimizer)
            return update(*args, **options)

        def step(_, *args, **options):
            last = accelerator.sync_gradients and not self.loading
            if last and not engine:
                self.before_update(model, optimizer)
            result = own_step(*args, **options)
            if last:
                self.done += 1
                self.in_step = False
                self.end()
            return result

        optimizer.step = types.MethodType(step, optimizer)  # A later schedule wraps a method.
        if engine:
            engine.step = engine_step
