"""Tell when an unchanged script is in a training step, by torch's own hooks, whatever prepared its
model: Accelerate, DistributedDataParallel, fully_shard, DeepSpeed, or an all-reduce by hand.
"""

import functools
import os
import sys
import weakref

import torch
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader
from torch.utils.data._utils import fetch


def patch(owner, name, new):
    """From now on `owner.name(...)` is `new(the old one, ...)`."""
    old = getattr(owner, name)

    @functools.wraps(old)
    def patched(*args, **options):
        return new(old, *args, **options)

    setattr(owner, name, patched)


def patch_fetch(new):
    """From now on `new(the old one, fetcher, indices)` reads each batch of a DataLoader."""
    for kind in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
        patch(kind, "fetch", new)


class StepWatch:
    """Tells when a script is in a training step. A subclass says what happens then.

    A model is a module with trainable parameters that the script calls itself, not from within
    another module. A module that holds an optimizer or a loader is a trainer, not a model. A step
    begins with the forward pass of a model, with gradients. It ends when an optimizer has stepped
    after a backward pass that this optimizer has not used yet. So what a script does between two
    steps, such as logging, does not count. Neither does the step without a backward pass by which
    a checkpoint is loaded into an optimizer that has no states yet.
    """

    def __init__(self):
        self.done = 0  # steps
        self.in_step = False
        self.models = []  # in the order of their first calls
        self.engine = None  # DeepSpeed's, if there is one
        self.calls = []  # the modules that are being called, the outermost first
        self.backwards = self.in_backward = 0  # backward passes so far, and those within others
        self.used = weakref.WeakKeyDictionary()  # {optimizer: the backward passes that it has used}
        self.stepping = None  # the optimizer that steps
        self.closure = False  # True while it waits for its closure to compute gradients

    def found_model(self, model):
        """A model is about to make its first forward pass with gradients."""

    def begin(self, model):
        """A step begins with this model."""

    def called(self, module, args, output):
        """The script has called a module, in a step or not. `args` has all arguments."""

    def before_backward(self, loss):
        """The script computes the gradients of `loss`, a tensor or several."""

    def before_update(self, optimizer):
        """Gradients are reduced, and the optimizer comes next."""

    def end(self):
        """A step is over, and counted in `done`."""

    def watch(self):
        """Watch all modules and optimizers of this process from now on."""
        modules.register_module_forward_pre_hook(self._enter)
        modules.register_module_forward_hook(self._leave, with_kwargs=True, always_call=True)
        optimizers.register_optimizer_step_pre_hook(self._update)
        optimizers.register_optimizer_step_post_hook(self._updated)
        patch(torch.autograd, "backward", self._backward)
        if "deepspeed" in sys.modules or "ACCELERATE_USE_DEEPSPEED" in os.environ:
            from deepspeed.runtime.engine import DeepSpeedEngine

            patch(DeepSpeedEngine, "step", self._step_engine)

    def _enter(self, module, _):
        if not self.calls and trains(module):
            return
        self.calls.append(module)
        # Activation checkpointing calls modules within the backward pass.
        if len(self.calls) > 1 or self.in_backward or not torch.is_grad_enabled():
            return
        if module not in self.models:
            if not any(weight.requires_grad for weight in module.parameters()):
                return  # a loss, or a frozen teacher
            self.models.append(module)
            self.found_model(module)
        if not self.in_step:
            self.in_step = True
            self.begin(module)

    def _leave(self, module, args, options, output=None):
        # If the call fails, as activation checkpointing does on purpose, torch omits `options`.
        if module not in self.calls:
            return
        self.calls.remove(module)
        if not self.calls and not self.in_backward:
            self.called(module, [args, options], output)

    def _backward(self, backward, tensors, *args, **options):
        if not self.in_backward:  # A function's own backward may begin another one.
            self.backwards += 1
            self.before_backward(tensors)
        self.in_backward += 1
        try:
            return backward(tensors, *args, **options)
        finally:
            self.in_backward -= 1
            if self.closure and not self.in_backward:
                self.closure = False
                self.before_update(self.stepping)

    def _update(self, optimizer, args=(), options=None):
        fresh = self.backwards > self.used.get(optimizer, 0)
        self.used[optimizer] = self.backwards
        closure = any(map(callable, [*args[1:], *(options or {}).values()]))
        if (fresh or closure) and self.stepping is None:  # Some optimizers step others.
            self.stepping, self.closure = optimizer, not fresh
            if fresh:
                self.before_update(optimizer)

    def _updated(self, optimizer, *_):
        if optimizer is not self.stepping:
            return
        self.stepping, self.used[optimizer] = None, self.backwards
        if not self.closure:  # Otherwise it has computed no gradients.
            self.done += 1
            self.in_step = False
            self.end()
        self.closure = False

    def _step_engine(self, step, engine, *args, **options):
        # DeepSpeed's own optimizer is none of torch's, and steps the script's once for each flat
        # group. The engine is called for each micro-batch.
        if not engine.is_gradient_accumulation_boundary():
            return step(engine, *args, **options)
        self.engine = engine
        self._update(engine.optimizer)
        result = step(engine, *args, **options)
        self._updated(engine.optimizer)
        return result


def trains(module):
    """Whether a module is no model, but trains one."""
    return any(
        isinstance(part, (torch.optim.Optimizer, DataLoader)) for part in vars(module).values()
    )


def name_of(name):
    """The name of a parameter or module without what wrappers put into it."""
    for own in ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module."):
        name = name.replace(own, "")
    # DistributedDataParallel and DeepSpeed call what they wrap a module.
    return ".".join(part for part in name.split(".") if part != "module")


def in_training(model):
    """Whether a model is in training mode. DeepSpeed's engine does not change its own."""
    return getattr(model, "module", model).training
