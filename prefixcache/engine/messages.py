"""Commands into the engine and events out of it: plain frozen data that serialises.

One batch of commands goes in before a step, one batch of events comes out after it, so that the
engine can run in a thread or in a process of its own. Nothing here refers to engine objects.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from prefixcache.errors import PrefixCacheError
from prefixcache.params import BeamSearchParams, SamplingParams

FinishReason = Literal["stop", "length", "abort"]
TokenIds = tuple[int, ...]

# ---------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class Generate:
    """Run a prompt, sampled or searched. `request_id` is unique among all live requests.

    tenant: whose it is, here and below. Nothing is shared or seen across tenants, whatever the
        salts. Empty where the server knows no tenants.
    trace_parent: W3C context of the caller's span, here and below; the engine only hands it on.
    """

    request_id: str
    prompt_token_ids: TokenIds
    params: SamplingParams | BeamSearchParams
    cache_salt: str = ""
    priority: int = 0
    keep_seconds: float = 0.0
    tenant: str = ""
    trace_parent: str = ""


@dataclass(frozen=True, slots=True)
class ForkBranch:
    """One branch of a Fork: a parent, how much of it to keep, and what comes behind.

    position: tokens of the parent that are kept, 1 to its length; None keeps all of them, the
        last sampled one included.
    token_ids: forced continuation behind them.
    """

    parent_id: str
    params: SamplingParams
    position: int | None = None
    token_ids: TokenIds = ()
    keep_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Fork:
    """Run branches of live or kept sequences, several parents in one call. Index = branch."""

    request_id: str
    branches: tuple[ForkBranch, ...]
    cache_salt: str = ""
    priority: int = 0
    tenant: str = ""
    trace_parent: str = ""


@dataclass(frozen=True, slots=True)
class Score:
    """Log-probabilities of given continuations behind one prefix. Index = continuation."""

    request_id: str
    prefix_token_ids: TokenIds
    continuations: tuple[TokenIds, ...]
    cache_salt: str = ""
    priority: int = 0
    top_logprobs: int = 0
    tenant: str = ""
    trace_parent: str = ""


def num_prompt_tokens(request: Generate | Fork | Score) -> int:
    """Tokens that a request brings, each once; what a fork takes over is not brought."""
    match request:
        case Generate():
            return len(request.prompt_token_ids)
        case Fork():
            return sum(len(branch.token_ids) for branch in request.branches)
        case Score():
            return len(request.prefix_token_ids) + sum(map(len, request.continuations))


def num_indexes(request: Generate | Fork | Score) -> int:
    """How many indexes a request has: each gets one Finished."""
    if isinstance(request, Generate):
        params = request.params
        return params.n if isinstance(params, SamplingParams) else params.num_return_sequences
    return len(request.branches if isinstance(request, Fork) else request.continuations)


@dataclass(frozen=True, slots=True)
class Abort:
    """End a live request, all its sequences; unknown ids are ignored."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Release:
    """Give back a kept sequence, or abort a live one; with `subtree` its descendants too.

    cache_salt: None, for operators only, stands for all salts.
    Answered by Reply with a ReleaseReceipt, or NotFound.
    """

    call_id: str
    sequence_id: str
    subtree: bool = False
    cache_salt: str | None = ""
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class ListSequences:
    """Answered by Reply with a tuple of SequenceInfo, of this salt only."""

    call_id: str
    cache_salt: str = ""
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class GetStats:
    """Answered by Reply with a CacheStats.

    tenant: None is the operator, who sees everything; a tenant sees its own numbers only, and
        nothing of the pool.
    """

    call_id: str
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class FlushCache:
    """Drop every cached block of this salt that is not in use; None: of all salts of the tenant.

    tenant: None is the operator, who drops everything.
    Answered by Reply with the number of blocks freed.
    """

    call_id: str
    cache_salt: str | None = None
    tenant: str | None = ""


@dataclass(frozen=True, slots=True)
class PinPrefix:
    """Keep the cached full blocks of a prompt from eviction. Answered by Reply with a PinInfo."""

    call_id: str
    token_ids: TokenIds
    seconds: float
    cache_salt: str = ""
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class UnpinPrefix:
    """Answered by Reply with a PinInfo, or NotFound. cache_salt: None is the operator's."""

    call_id: str
    pin_id: str
    cache_salt: str | None = ""
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class TenantPolicy:
    """What a tenant may use; None sets no limit.

    weight: its share of the work beside the other tenants' weights, above 0.
    max_sequences: of it, that wait or run at once. max_leases: kept at once.
    pool_share: part of the pool, above 0 and up to 1, that its sequences, each at its longest, and
        its pins may hold.
    tokens_per_minute: prompt tokens that it sends and tokens generated for it.
    """

    name: str
    weight: float = 1.0
    max_sequences: int | None = None
    max_leases: int | None = None
    pool_share: float | None = None
    tokens_per_minute: int | None = None


@dataclass(frozen=True, slots=True)
class SetTenants:
    """All tenants there are, from now on. What runs already goes on."""

    policies: tuple[TenantPolicy, ...]


@dataclass(frozen=True, slots=True)
class SubscribeEvents:
    """Answered by Reply with the number of the last event that will not come; batches follow.

    after: last sequence number that the subscriber has; None starts at the present.
    snapshot: start at the present and answer with what is cached now: a tuple of CacheEvent, all of
        the last number, which clear everything and store it anew, parents first.
    cache_salt: the one namespace to tell of, with tenant: what others store comes as an event that
        stores nothing. None tells of all.
    Answered with FailedPrecondition where the backlog no longer reaches back so far.
    """

    call_id: str
    after: int | None = None
    with_tokens: bool = False
    snapshot: bool = False
    cache_salt: str | None = None
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class UnsubscribeEvents:
    """End the subscription that `call_id` began."""

    call_id: str


@dataclass(frozen=True, slots=True)
class InspectCache:
    """What an operator's page shows, of one moment. Answered by Reply with a `views.CacheView`.

    max_nodes, max_sequences: bound its size and the time that it takes.
    label_tokens: how many tokens of each node to tell; 0 tells no token of any prompt.
    """

    call_id: str
    max_nodes: int = 200
    max_sequences: int = 200
    label_tokens: int = 0


@dataclass(frozen=True, slots=True)
class InspectNode:
    """Who uses a node of the tree. Answered by Reply with a `views.NodeDetail`, or NotFound.

    digest: as the last InspectCache or InspectNode gave it.
    max_tokens: how many tokens of its run to tell; label_tokens: of each child's.
    """

    call_id: str
    digest: bytes
    max_tokens: int = 0
    label_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PinNode:
    """Keep a node and all above it from eviction. Answered by Reply with a PinInfo, or NotFound."""

    call_id: str
    digest: bytes
    seconds: float


@dataclass(frozen=True, slots=True)
class FlushNode:
    """Drop the blocks at and below a node that are not in use.

    Answered by Reply with the number of blocks freed, or NotFound.
    """

    call_id: str
    digest: bytes


Inspection = InspectCache | InspectNode | PinNode | FlushNode

Command = (
    Generate
    | Fork
    | Score
    | Abort
    | Release
    | ListSequences
    | GetStats
    | FlushCache
    | PinPrefix
    | UnpinPrefix
    | SetTenants
    | SubscribeEvents
    | UnsubscribeEvents
    | Inspection
)

# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: of the token there, and the best ones in order."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one sequence. cached + forked + computed = prompt; each token counts once.

    Samples of one request share a prompt: only index 0 counts it, the others have prompt = 0.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    forked_tokens: int = 0
    computed_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Started:
    """A sequence has been admitted; the first event of each index."""

    request_id: str
    index: int
    sequence_id: str
    stream_key: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_forked_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Output:
    """What one step added to a sequence. `text` may lag behind the tokens by part of a character.

    prompt_logprobs: on the first Output only, where asked for; one entry a prompt token, the
        first one None. Of a Score: one entry a token of the continuation.
    """

    request_id: str
    index: int
    token_ids: TokenIds = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of an index. The request ends with the last index.

    stop_reason: the stop string or stop token id that ended it, else None.
    next_token: with max_tokens = 0, the distribution of the token that would come next:
        token_id is the most probable one.
    kept_seconds: how long the sequence can still be forked; 0 where it was not kept.
    score: of a beam search's hypothesis, by which its results are ordered.
    """

    request_id: str
    index: int
    reason: FinishReason
    stop_reason: str | int | None
    usage: Usage
    kept_seconds: float = 0.0
    next_token: TokenLogprobs | None = None
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The whole request ended in an error, perhaps before it began.

    AlreadyExists is about a second request of the name: the first one goes on.
    """

    request_id: str
    error: PrefixCacheError


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a command with a `call_id`."""

    call_id: str
    value: object = None
    error: PrefixCacheError | None = None


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """One change of the trie, numbered without gaps from 1.

    kind: "stored" (blocks entered the trie behind `parent`), "removed" or "cleared" (all went).
    parent: the digest of the block before; empty at the start of a prompt.
    digests: one a block, in order; 16 bytes each.
    token_ids: of the stored blocks, where the subscriber asked for them.
    seed_id: names the seed of the digests: those of two servers can be compared where it is equal.
    """

    number: int
    kind: Literal["stored", "removed", "cleared"]
    parent: bytes = b""
    digests: tuple[bytes, ...] = ()
    block_size: int = 0
    token_ids: TokenIds = ()
    seed_id: str = ""


@dataclass(frozen=True, slots=True)
class CacheEvents:
    """A batch for the subscription that `call_id` began."""

    call_id: str
    events: tuple[CacheEvent, ...]


Event = Started | Output | Finished | Failed | Reply | CacheEvents

# ---------------------------------------------------------------- values of replies


@dataclass(frozen=True, slots=True)
class SequenceInfo:
    """One live or kept sequence as ListSequences shows it."""

    sequence_id: str
    parent_id: str
    request_id: str
    state: Literal["waiting", "running", "kept"]
    num_tokens: int
    fork_position: int
    own_blocks: int
    shared_blocks: int
    stream_key: int
    kept_seconds: float


@dataclass(frozen=True, slots=True)
class ReleaseReceipt:
    """What a Release did."""

    sequence_ids: tuple[str, ...]
    blocks_freed: int


@dataclass(frozen=True, slots=True)
class PinInfo:
    """A pin: what it covers and for how long."""

    pin_id: str
    num_tokens: int
    num_blocks: int
    seconds: float


MissCause = Literal["never_seen", "evicted", "other_namespace", "bypassed", "remainder"]


@dataclass(frozen=True, slots=True)
class SizePoint:
    """What a pool of another size would have hit. scale: times today's pool; blocks: its size.

    hit_rate: of prompt tokens, 0 to 1; None before the first lookup.
    """

    scale: float
    blocks: int
    hit_rate: float | None


@dataclass(frozen=True, slots=True)
class Histogram:
    """How often a value fell where. counts: one a bound, up to and including it, and one above all.

    Not cumulative. name is that of docs/metrics.md, without the prefix; sum is of all values.
    """

    name: str
    labels: Mapping[str, str]
    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float


@dataclass(frozen=True, slots=True)
class TenantStats:
    """Tokens of one tenant. tenant: a digest of its salt, or "other" for all that are left."""

    tenant: str
    cached_tokens: int
    forked_tokens: int
    computed_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Pool and counters at one moment; docs/metrics.md defines each figure.

    Token counters are over all admitted requests: cached + forked + computed = prompt.
    sequences_waiting: preempted ones (sequences_preempted) included.
    blocks_shared: used by several running sequences. blocks_saved: more that these would need if
        each had its own. blocks_leased: held for kept sequences and queued forks.
    misses: computed tokens by MissCause; all causes are there, and they add up to computed_tokens.
    finish_reasons: sequences that ended, by FinishReason; all reasons are there.
    tenants: only where the configuration asks for them.
    extra: what observers tell of themselves: recording_failed, of `serve --record`.
    """

    block_size: int
    blocks_total: int
    blocks_free: int
    blocks_evictable: int
    blocks_in_use: int
    blocks_pinned: int
    sequences_running: int
    sequences_waiting: int
    sequences_kept: int
    prompt_tokens: int
    cached_tokens: int
    forked_tokens: int
    computed_tokens: int
    recomputed_tokens: int
    completion_tokens: int
    preemptions: int
    forks: int
    block_copies: int
    evicted_blocks: int
    requests_finished: int
    requests_aborted: int
    requests_failed: int
    same_bits: bool
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    bytes_per_block: int = 0
    blocks_shared: int = 0
    blocks_saved: int = 0
    blocks_leased: int = 0
    sequences_preempted: int = 0
    misses: Mapping[str, int] = field(default_factory=dict)
    finish_reasons: Mapping[str, int] = field(default_factory=dict)
    size_curve: tuple[SizePoint, ...] = ()
    histograms: tuple[Histogram, ...] = ()
    tenants: tuple[TenantStats, ...] = ()
    extra: Mapping[str, float] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float | None:
        """Cached ÷ (cached + computed) prompt tokens, 0 to 1; None before the first of them."""
        looked_up = self.cached_tokens + self.computed_tokens
        return self.cached_tokens / looked_up if looked_up else None

    @property
    def bytes_saved(self) -> int:
        """Memory that sharing saves now."""
        return self.blocks_saved * self.bytes_per_block
