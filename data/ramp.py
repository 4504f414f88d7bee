"""Which samples each step reads: the batch may grow over the first portions of a run, and steps may be passed over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from data.config import RampConfig, StepRange


@dataclass(frozen=True)
class PlannedStep:
    """What a step reads."""

    number: int
    """From 1 on."""
    samples: range
    """Global numbers of its samples."""
    passed_over: bool
    """Whether its samples are counted as read, but not trained on (train.skip_steps)."""


class Ramp:
    """Sizes of steps: of the first portions as configured, then of the whole batch.

    What a step's size depends on is the number of its first sample, so that a run goes on where it stands even if
    its ramp was changed meanwhile.
    """

    def __init__(self, global_batch: int, portions: Sequence[RampConfig] = (), seq_len: int = 1) -> None:
        """global_batch: samples a step after the portions. A portion ends with the step that fills its tokens."""
        self.global_batch = global_batch
        self._portions: list[tuple[int, int]] = []  # sample behind its last one, samples a step
        end = 0
        for each in portions:
            end += -(-each.tokens // (each.global_batch * seq_len)) * each.global_batch
            self._portions.append((end, each.global_batch))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples a step, of every size that there is, in the order of the run."""
        return tuple(dict.fromkeys([*(size for _, size in self._portions), self.global_batch]))

    def size(self, sample: int) -> int:
        """Samples of the step that begins at `sample`."""
        return next((size for end, size in self._portions if sample < end), self.global_batch)

    def after(self, sample: int, steps: int) -> int:
        """Sample at which a run stands that takes `steps` steps from `sample` on."""
        for end, size in self._portions:
            if sample < end:
                taken = min(steps, -(-(end - sample) // size))
                sample, steps = sample + taken * size, steps - taken
        return sample + steps * self.global_batch

    def steps_within(self, samples: int) -> int:
        """Whole steps in the first `samples` samples of a run."""
        at = steps = 0
        for end, size in self._portions:
            taken = min(max(0, -(-(end - at) // size)), max(0, (samples - at) // size))
            at, steps = at + taken * size, steps + taken
            if at < end:
                return steps
        return steps + (samples - at) // self.global_batch

    def plan(self, sample: int, begin: int, last: int, skips: Sequence[StepRange] = ()) -> Iterator[PlannedStep]:
        """Steps begin + 1 to `last` of a run that stands at `sample`."""
        for number in range(begin + 1, last + 1):
            size = self.size(sample)
            yield PlannedStep(number, range(sample, sample + size), any(each.holds(number) for each in skips))
            sample += size
