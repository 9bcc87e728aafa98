"""What each tenant uses of what it may: quotas.

Counts nothing twice: what a tenant holds is read from its groups and from the registry when it
asks for more. Owns only the buckets of tokens. A refusal tells the tenant's own use, the configured
limit, and when to ask again; nothing of others.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prefixcache.cache import Pin
from prefixcache.engine.messages import TenantPolicy
from prefixcache.engine.registry import Registry
from prefixcache.engine.sequence import SequenceGroup
from prefixcache.errors import ResourceExhausted

RETRY_SECONDS = 1.0
"""When to ask again where that hangs on how long requests run."""


@dataclass(slots=True)
class Bucket:
    """Tokens that a tenant may still use; fills at its rate, up to what one minute gives.

    May fall below zero: how much a request will generate is not known when it is taken in.
    """

    left: float
    filled: float

    def fill(self, per_minute: int, now: float) -> None:
        """Bring it to the present."""
        self.left = min(self.left + (now - self.filled) * per_minute / 60, float(per_minute))
        self.filled = now


class Quotas:
    """The quotas of all tenants; a tenant without a policy has none.

    groups: live requests by id. num_blocks: of the pool. clock: monotonic, in seconds.
    """

    def __init__(
        self,
        groups: Mapping[str, SequenceGroup],
        registry: Registry,
        num_blocks: int,
        clock: Callable[[], float],
    ) -> None:
        self._groups = groups
        self._registry = registry
        self._num_blocks = num_blocks
        self._clock = clock
        self._policies: dict[str, TenantPolicy] = {}
        self._buckets: dict[str, Bucket] = {}

    def set(self, policies: Iterable[TenantPolicy]) -> None:
        """All policies from now on; what tenants have used is not forgotten."""
        self._policies = {policy.name: policy for policy in policies}
        self._buckets = {n: b for n, b in self._buckets.items() if n in self._policies}

    # ------------------------------------------------------------ requests

    def take_in(self, group: SequenceGroup, num_tokens: int) -> None:
        """Charge a request that is about to be queued. Raises ResourceExhausted, charging nothing.

        num_tokens: what it brings.
        """
        policy = self._policies.get(group.tenant)
        if policy is None:
            return
        own = [other for other in self._groups.values() if other.tenant == policy.name]
        self._check_sequences(policy, own, group)
        self._check_leases(policy, own, group)
        self._check_share(policy, group.most_blocks, "with all its tokens this request holds")
        self._check_tokens(policy)
        self._charge(policy, num_tokens)

    def generated(self, group: SequenceGroup, num_tokens: int) -> None:
        """Charge tokens that were made."""
        policy = self._policies.get(group.tenant)
        if policy is not None and num_tokens:
            self._charge(policy, num_tokens)

    def _check_sequences(
        self, policy: TenantPolicy, own: Iterable[SequenceGroup], group: SequenceGroup
    ) -> None:
        limit = policy.max_sequences
        if limit is None:
            return
        live, asked = sum(other.num_branches for other in own), group.num_branches
        if live + asked > limit:
            raise ResourceExhausted(
                f"{live} of your sequences wait or run, and this request asks for {asked} more; "
                f"you may have {limit} at once (max_sequences)",
                _retry(asked <= limit),
            )

    def _check_leases(
        self, policy: TenantPolicy, own: Iterable[SequenceGroup], group: SequenceGroup
    ) -> None:
        limit, asked = policy.max_leases, group.num_to_keep
        if limit is None or not asked:
            return
        expiries = self._registry.kept_until(policy.name)
        kept = len(expiries) + sum(other.num_to_keep for other in own)
        if kept + asked > limit:
            soonest = min(map(self._registry.seconds_left, expiries), default=RETRY_SECONDS)
            raise ResourceExhausted(
                f"{kept} of your sequences are kept or will be, and this request asks for {asked} "
                f"more; you may keep {limit} at once (max_leases): release some",
                soonest if asked <= limit else None,
            )

    def _check_tokens(self, policy: TenantPolicy) -> None:
        limit = policy.tokens_per_minute
        if limit is None:
            return
        bucket = self._bucket(policy.name, limit)
        if bucket.left < 1:
            raise ResourceExhausted(
                f"you have used {limit - bucket.left:.0f} tokens of the {limit} that you may use "
                "in a minute (tokens_per_minute)",
                (1 - bucket.left) * 60 / limit,
            )

    def _charge(self, policy: TenantPolicy, num_tokens: int) -> None:
        if policy.tokens_per_minute is not None:
            self._bucket(policy.name, policy.tokens_per_minute).left -= num_tokens

    def _bucket(self, tenant: str, per_minute: int) -> Bucket:
        now = self._clock()
        bucket = self._buckets.setdefault(tenant, Bucket(float(per_minute), now))
        bucket.fill(per_minute, now)
        return bucket

    # ------------------------------------------------------------ the pool

    def check_pin(self, tenant: str, pin: Pin) -> None:
        """Refuse a pin that would take a tenant above its share. Raises ResourceExhausted."""
        policy = self._policies.get(tenant)
        if policy is not None:
            self._check_share(policy, pin.num_blocks, "this pin holds")

    def _check_share(self, policy: TenantPolicy, asked: int, what: str) -> None:
        if policy.pool_share is None:
            return
        limit = int(policy.pool_share * self._num_blocks)
        own = (other for other in self._groups.values() if other.tenant == policy.name)
        held = sum(group.most_blocks for group in own)
        held += sum(e.pin.num_blocks for e in self._registry.pins() if e.tenant == policy.name)
        if held + asked > limit:
            raise ResourceExhausted(
                f"{what} {asked} blocks, and your live requests and pins up to {held}; you may "
                f"hold {limit}, {policy.pool_share:g} of the pool's {self._num_blocks} "
                "(pool_share); a max_tokens makes a request smaller",
                _retry(asked <= limit),
            )


def _retry(ever: bool) -> float | None:
    return RETRY_SECONDS if ever else None
