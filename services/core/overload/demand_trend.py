"""Whether the demand of a model with merged groups keeps rising (KunServe, "Autoscaling").

Merges gain a limited amount of memory, and new workers take long to start. A continuous rise is
therefore reported before merges are exhausted. The rule compares the mean demand of consecutive
periods of `trend_period_s`, all with merged groups:

    rising: each of the last `trend_periods` means exceeds the previous mean by at least
    `trend_share` of the undropped capacity, and the last mean exceeds this capacity

So flat demand, falling demand and a single step, which raises at most two means, are no trend. A
period without a rise ends a trend. Long periods average noise. A step that fills KV over more than
`trend_periods` periods cannot be distinguished from a ramp, so it is reported until then.
"""

from dataclasses import dataclass

from services.core.overload.events import ModelLoad, OverloadConfig


@dataclass(slots=True)
class DemandTrend:
    """The trend of a model's demand, from samples of its load."""

    rises: int = 0  # consecutive periods with a rise, until now
    high: bool = False  # the last mean exceeded the undropped capacity
    _began_s: float | None = None  # start of the current period; None: no merged groups
    _sampled_s: float = 0.0
    _demand_s: float = 0.0  # integral of demand over the sampled time of this period
    _weight_s: float = 0.0  # the sampled time
    _mean_tokens: float | None = None  # of the previous period

    def is_rising(self, config: OverloadConfig) -> bool:
        """Whether demand keeps rising; see the module."""
        return self.high and self.rises >= config.trend_periods

    def clear(self) -> None:
        """Forget the demand so far: no groups are merged."""
        self.rises, self.high = 0, False
        self._began_s = self._mean_tokens = None

    def skip(self, now_s: float) -> None:
        """Leave the time until `now_s` out: a group is in a change-over, so demand is unknown."""
        self._sampled_s = now_s

    def sample(self, load: ModelLoad, config: OverloadConfig, now_s: float) -> None:
        """Add the load since the last sample."""
        if self._began_s is None:
            self._begin(now_s)
            return
        passed_s = now_s - self._sampled_s
        self._sampled_s = now_s
        self._demand_s += load.demand_tokens * passed_s
        self._weight_s += passed_s
        if now_s - self._began_s < config.trend_period_s or self._weight_s <= 0:
            return
        mean = self._demand_s / self._weight_s
        least = config.trend_share * load.undropped_tokens
        rose = self._mean_tokens is not None and mean - self._mean_tokens >= least
        self.rises = self.rises + 1 if rose else 0
        self.high = mean > load.undropped_tokens
        self._mean_tokens = mean
        self._begin(now_s)

    def _begin(self, now_s: float) -> None:
        self._began_s = self._sampled_s = now_s
        self._demand_s = self._weight_s = 0.0
