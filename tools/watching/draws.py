"""Let what a script draws depend on the sample, the step and the number of the draw, not on the
rank that draws it: noise, timesteps, masks, augmentation. Then ranks draw the same as one process.
"""

import contextlib
import pickle
import random
import zlib

import numpy
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from watching.steps import patch

# Functions of torch and methods of tensors.
DRAWS = {"rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "normal"}
DRAWS |= {"bernoulli", "poisson", "multinomial", "normal_", "uniform_", "random_", "bernoulli_"}
DRAWS |= {"exponential_", "log_normal_", "cauchy_", "geometric_"}
GENERATORS = []  # those of numpy that the script has made


def random_states():
    """{a library: the state of its random generator, as bytes}"""
    states = {"python": random.getstate(), "numpy": numpy.random.get_state()}
    states |= {"cpu": torch.get_rng_state().numpy()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state().numpy()
    states |= {number: one.bit_generator.state for number, one in enumerate(GENERATORS)}
    return {name: pickle.dumps(state) for name, state in states.items()}


def set_states(states):
    """Bring back what random_states has returned."""
    states = {name: pickle.loads(state) for name, state in states.items()}
    random.setstate(states.pop("python"))
    numpy.random.set_state(states.pop("numpy"))
    torch.set_rng_state(torch.from_numpy(states.pop("cpu")))
    if "cuda" in states:
        torch.cuda.set_rng_state(torch.from_numpy(states.pop("cuda")))
    for number, state in states.items():
        GENERATORS[number].bit_generator.state = state


def set_seed(seed):
    """Seed all of these generators."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed takes ten times as long
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    for one in GENERATORS:
        one.bit_generator.state = type(one.bit_generator)(seed).state


def moved(before):
    """Those of the states `before` whose generators have drawn since."""
    now = random_states()
    return {name: state for name, state in before.items() if now[name] != state}


def checksum(states):
    """A number for these states, the same on ranks that draw the same."""
    return zlib.crc32(b"".join(states.values()))


def generator_of(args, options):
    """The random generator that a function of torch uses with these arguments."""
    if options.get("generator"):
        return options["generator"]
    devices = [arg.device for arg in args if isinstance(arg, torch.Tensor)]
    device = torch.device(options.get("device") or (devices or [torch.get_default_device()])[0])
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def new_record():
    """What is noted of draws. "rows" counts numbers, or rows of them, that were drawn for samples.
    "noise" has {kind: a checksum of the state from which the first was drawn}, where the kind is
    "dropout" or "noise". "others" is a checksum of all that belongs to no sample: 0, if nothing.
    """
    return {"rows": 0, "noise": {}, "others": 0}


def add_record(record, more):
    """Add what was noted later."""
    record["rows"] += more["rows"]
    record["noise"] = more["noise"] | record["noise"]
    record["others"] ^= more["others"]


class Draws(TorchFunctionMode):
    """Draws for each sample of a batch, if a function draws as many rows as there are samples.

    Draws are numbered by the state of their generator, in the order of first appearance. So
    activation checkpointing, which brings back the state, draws the same again.
    """

    def __init__(self, watch):
        super().__init__()
        self.watch = watch
        self.record = new_record()
        self.busy = False
        self.hand_out([], new_record())

    def hand_out(self, samples, record):
        """From now on draws belong to these samples, whose reading has drawn what `record` says."""
        self.owners, self.numbers = samples, {}
        add_record(self.record, record)
        self.states = random_states()

    def take(self):
        """What was noted since the last call."""
        before, self.states = self.states, random_states()
        self.note_others(before, self.states)
        record, self.record = self.record, new_record()
        return record

    def note_others(self, before, after):
        """Note that generators have moved from states `before` to `after`. Those that draw the same
        on one process and on a rank do so between the same states.
        """
        for name, state in before.items():
            if state != after[name]:
                self.record["others"] = zlib.crc32(state + after[name], self.record["others"])

    def note(self, kind, states):
        """Note that something of this kind is drawn from these states, if the script seeds them."""
        if not self.watch.seeded:
            self.record["noise"].setdefault(kind, checksum(states))

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        by_rows, own = getattr(function, "__name__", "") in DRAWS, kwargs.get("generator")
        if not self.owners or self.busy or not (by_rows or own):
            return function(*args, **kwargs)
        generator = generator_of(args, kwargs)
        state = generator.get_state()
        found = function(*args, **kwargs)
        one_for_all = function.__name__ == "multinomial" and args[0].ndim == 1
        if by_rows and not one_for_all and found.ndim and len(found) == len(self.owners):
            self.busy = True  # A backward pass enters the mode once more.
            self.draw_rows(found, function, args, kwargs, generator, state)
            self.busy = False
        elif own:  # `states` has only the default ones.
            after = pickle.dumps(generator.get_state().numpy())
            self.note_others({"own": pickle.dumps(state.numpy())}, {"own": after})
        return found

    def draw_rows(self, found, function, args, options, generator, state):
        """Draw each row of `found` again, from a seed of its sample. The generator goes on by one
        number from `state`, on one process and on each rank alike.
        """
        name, rows, raw = function.__name__, len(found), pickle.dumps(state.numpy())
        number = self.numbers.setdefault((id(generator), raw), len(self.numbers))
        if name in ("rand", "randn") and isinstance((*args, None)[0], int):
            args = (args,)  # the sizes

        def of_row(row, value):
            if isinstance(value, torch.Tensor) and value.ndim and len(value) == rows:
                return value[row : row + 1]
            if isinstance(value, (tuple, list)) and value and value[0] == rows:
                return (1, *value[1:])
            return value

        parts = []
        with torch.no_grad():
            for row, owner in enumerate(self.owners):
                own = repr((owner, self.watch.done, number))
                generator.manual_seed(zlib.crc32(own.encode()))
                own_options = {key: of_row(row, value) for key, value in options.items()}
                parts.append(function(*(of_row(row, arg) for arg in args), **own_options))
            if not name.endswith("_"):  # Otherwise it has filled the rows of its tensor.
                found.copy_(torch.cat(parts))
        generator.set_state(state)
        torch.empty(1, device=generator.device).uniform_(generator=generator)
        if self.watch.in_backward:
            return
        if not options.get("generator"):
            device = generator.device.type
            self.note_others({device: self.states.get(device, raw)}, {device: raw})
            self.states[device] = pickle.dumps(generator.get_state().numpy())
        self.record["rows"] += rows
        within = [type(module).__name__.lower() for module in self.watch.calls[-2:]]
        drops = "bernoulli" in name or any("drop" in module for module in within)
        self.note("dropout" if within and drops else "noise", {"own": raw})

    @contextlib.contextmanager
    def collating(self, samples):
        """While samples are made a batch, draws belong to them, and change no state."""
        before, outer = random_states(), (self.owners, self.numbers, self.states)
        self.owners, self.numbers, self.states = samples, {}, dict(before)
        yield
        if not moved(self.states):
            set_states(before)
        self.owners, self.numbers, self.states = outer

    def read(self, take, fetcher, indices, again):
        """A batch of a loader, and a record of what was drawn for it. If something was drawn, read
        each sample `again`, from a seed of its index.
        """
        outer, self.record = self.record, new_record()
        before = random_states()
        batch = take(fetcher, indices)
        drew = moved(before)
        mapped = isinstance(fetcher, _MapDatasetFetcher) and fetcher.auto_collation
        if again and drew and mapped:
            first, after, data = self.record, random_states(), fetcher.dataset
            self.record, fetcher.dataset = new_record(), SeededBySample(data, self.watch)
            set_states(before)
            self.note("noise", drew)
            try:
                batch = take(fetcher, indices)
            except Exception:  # Some data sets pad their samples to those of all indices.
                self.record = first
                set_states(after)
            fetcher.dataset = data
        self.note_others(before, random_states())
        record, self.record = self.record, outer
        return batch, record


class SeededBySample:
    """A data set whose random augmentation of a sample is the same, whichever rank reads it."""

    def __init__(self, data, watch):
        self.data, self.watch = data, watch

    def seeded(self, index, read, argument):
        """What `read(argument)` returns if the generators have a seed of this sample and step."""
        before = random_states()
        set_seed(zlib.crc32(repr((index, self.watch.done)).encode()))
        found = read(argument)
        set_states(before)
        return found

    def __getitem__(self, index):
        return self.seeded(index, self.data.__getitem__, index)

    def __getitems__(self, indices):
        read = getattr(self.data, "__getitems__", None)
        if not read:
            return [self[index] for index in indices]
        parts = [self.seeded(index, read, [index]) for index in indices]
        # Some data sets return no list of samples, but a batch.
        return [one for [one] in parts] if isinstance(parts[0], list) else read(indices)


def watch_generators():
    """From now on GENERATORS has those of numpy that the script makes."""

    def make(default_rng, *args, **options):
        made = default_rng(*args, **options)
        GENERATORS.append(made)
        return made

    patch(numpy.random, "default_rng", make)
