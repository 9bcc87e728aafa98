"""From commands to sequence groups: what is checked, and what a sequence begins with.

Owns the rules of admission to the queue and the numbering of random streams. Changes no block.
"""

import itertools
import secrets
from collections.abc import Sequence as Seq

import numpy as np

from prefixcache.cache import namespace_key, token_bytes
from prefixcache.config import EngineConfig
from prefixcache.engine.beam import BeamSearch
from prefixcache.engine.detokenizer import IncrementalDetokenizer
from prefixcache.engine.messages import Fork, ForkBranch, Generate, Score, TokenIds
from prefixcache.engine.philox import derive_key, root_key
from prefixcache.engine.registry import Entry, Registry
from prefixcache.engine.sampler import SamplerState
from prefixcache.engine.sequence import (
    Owner,
    Sequence,
    SequenceGroup,
    State,
    TokenBuffer,
    Tokens,
)
from prefixcache.engine.sizing import blocks_at_most, check_fits, shared_tokens
from prefixcache.engine.stop import StopChecker, StopStrings
from prefixcache.errors import InvalidArgument, ResourceExhausted
from prefixcache.model.config import ModelConfig
from prefixcache.model.tokenizer import Tokenizer
from prefixcache.params import BeamSearchParams, SamplingParams

_PROMPT_TAIL = 64
"""Tokens of a prompt that the detokenizer looks at: more than any character's bytes need."""


class RequestBuilder:
    """Makes groups for one engine. Raises PrefixCacheError for what cannot be served."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        *,
        fingerprint: bytes,
        model: ModelConfig,
        num_blocks: int,
        max_model_len: int,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._fingerprint = fingerprint
        self._eos_ids = frozenset(model.eos_token_ids)
        self._num_blocks = num_blocks
        self._max_model_len = max_model_len
        self._arrivals = itertools.count()
        self._base_key = None if config.seed is None else root_key(config.seed)

    def namespace(self, owner: Owner) -> bytes:
        """The namespace that requests of an owner share."""
        return namespace_key(model=self._fingerprint, tenant=owner.tenant, salt=owner.salt)

    def namespaces(self, tenant: str) -> bytes:
        """What the namespaces of all salts of a tenant begin with."""
        return namespace_key(model=self._fingerprint, tenant=tenant, salt=None)

    # ------------------------------------------------------------ one builder a command

    def generate(self, command: Generate) -> SequenceGroup:
        """A prompt, to be sampled n times, or searched."""
        arrival = next(self._arrivals)
        tokens = self.prompt("prompt", command.prompt_token_ids)
        self.check_keep("keep_seconds", command.keep_seconds)
        if isinstance(command.params, BeamSearchParams):
            return self._search(command, command.params, tokens, arrival)
        params = command.params
        self._check(tokens, params, "sampling")
        sequence = self._sequence(0, tokens, params, self._key(params, arrival), _owner(command))
        sequence.keep_seconds = command.keep_seconds
        if params.prompt_logprobs is not None:
            sequence.logprob_start, sequence.top_logprobs = 0, params.prompt_logprobs
            sequence.prompt_logprobs.append(None)  # nothing precedes the first token
        n = params.n
        room = self._check_room([len(tokens)] * n, [0, *[len(tokens)] * (n - 1)], [params] * n)
        namespace = self._namespace_of(_owner(command), arrival)
        group = SequenceGroup(command.request_id, [sequence], command.priority, arrival, namespace)
        group.num_samples = n
        group.most_blocks = room
        return group

    def fork(self, command: Fork, registry: Registry) -> SequenceGroup:
        """Branches of live or kept sequences. The caller leases their blocks and numbers them."""
        arrival = next(self._arrivals)
        if not command.branches:
            raise InvalidArgument("branches", "at least one branch is needed")
        owner = _owner(command)
        parents = [registry.get(branch.parent_id, owner) for branch in command.branches]
        sequences = [
            self._branch(index, branch, parent)
            for index, (branch, parent) in enumerate(zip(command.branches, parents, strict=True))
        ]
        namespaces = {parent.group.namespace for parent in parents}
        if len(namespaces) > 1:
            raise InvalidArgument("branches", "parents of one call must share a namespace")
        shared = shared_tokens([token_bytes(s.tokens.view()) for s in sequences])
        lengths = [len(s.tokens) for s in sequences]
        room = self._check_room(lengths, shared, [s.params for s in sequences])
        group = SequenceGroup(
            command.request_id, sequences, command.priority, arrival, namespaces.pop()
        )
        group.is_fork = True
        group.most_blocks = room
        return group

    def number_branch(self, child: Sequence, parent: Sequence) -> None:
        """Count a branch of its parent and give it its key: once nothing can refuse it any more."""
        key = derive_key(parent.stream_key, parent.next_branch)
        parent.next_branch += 1
        if child.params.stream_key is not None:
            key = child.params.stream_key
        elif child.params.seed is not None:  # one seed for all branches must not make them equal
            key = derive_key(root_key(child.params.seed), child.index)
        child.stream_key = key

    def score(self, command: Score) -> SequenceGroup:
        """Continuations behind one prefix; each is a prompt whose end is scored."""
        arrival = next(self._arrivals)
        if not command.continuations:
            raise InvalidArgument("continuations", "at least one continuation is needed")
        prefix = self.prompt("prefix", command.prefix_token_ids)
        params = SamplingParams(max_tokens=0)
        sequences = []
        for index, continuation in enumerate(command.continuations):
            field = f"continuations[{index}]"
            tokens = np.concatenate([prefix, self.prompt(field, continuation)])
            self._check(tokens, params, field)
            sequence = self._sequence(index, tokens, params, 0, _owner(command))
            sequence.logprob_start = len(prefix)
            sequence.top_logprobs = command.top_logprobs
            sequences.append(sequence)
        lengths = [len(s.tokens) for s in sequences]
        shared = [0, *[len(prefix)] * (len(lengths) - 1)]
        room = self._check_room(lengths, shared, [params] * len(lengths))
        namespace = self._namespace_of(_owner(command), arrival)
        group = SequenceGroup(command.request_id, sequences, command.priority, arrival, namespace)
        group.most_blocks = room
        return group

    def sample(self, parent: Sequence, index: int) -> Sequence:
        """Another sample of a prompt that `parent` has just run: a fork at the prompt's end."""
        key = derive_key(parent.stream_key, parent.next_branch)
        parent.next_branch += 1
        sample = self._sequence(index, parent.tokens.view(), parent.params, key, parent.owner)
        sample.counts_prompt = False
        sample.parent_id = parent.id
        sample.fork_position = len(parent.tokens)
        sample.keep_seconds = parent.keep_seconds
        return sample

    def hypothesis(self, group: SequenceGroup, index: int, generated: TokenIds) -> Sequence:
        """A result of a beam search, as a sequence that has ended.

        A search draws nothing; the keys are for forks, and follow from one another as samples' do.
        """
        first, search = group.first, group.beam
        assert search is not None
        prompt = first.tokens.view()[: first.num_prompt_tokens]
        key = derive_key(first.stream_key, index - 1) if index else first.stream_key
        result = self._sequence(index, prompt, first.params, key, first.owner)
        for token in generated:
            result.tokens.append(token)
        result.state = State.FINISHED
        result.keep_seconds = first.keep_seconds
        result.counts_prompt, result.counted = index == 0, True
        if index == 0:
            result.id = first.id
            result.next_branch = search.params.num_return_sequences - 1
            result.num_cached_tokens = first.num_cached_tokens
        return result

    # ------------------------------------------------------------ parts

    def _search(
        self, command: Generate, params: BeamSearchParams, tokens: Tokens, arrival: int
    ) -> SequenceGroup:
        """A prompt to be searched: its sequence becomes the first beam."""
        params.validate(self._tokenizer.vocab_size, limits=self._config.limits)
        self._check(tokens, params.as_sampling(), "beam_search")
        sampling = params.as_sampling()
        key = self._key(sampling, arrival)
        sequence = self._sequence(0, tokens, sampling, key, _owner(command))
        sequence.keep_seconds = command.keep_seconds
        search = BeamSearch(params, len(sequence.stop_ids))
        if search.num_candidates > self._tokenizer.vocab_size:
            raise InvalidArgument(
                "beam_search.num_beams",
                f"the search looks at {search.num_candidates} tokens a step, and the vocabulary "
                f"has {self._tokenizer.vocab_size}",
            )
        beams = [len(tokens)] * params.num_beams
        room = self._check_room(beams, [0, *beams[1:]], [sequence.params] * params.num_beams)
        namespace = self._namespace_of(_owner(command), arrival)
        group = SequenceGroup(command.request_id, [sequence], command.priority, arrival, namespace)
        group.beam = search
        group.most_blocks = room
        return group

    def _branch(self, index: int, branch: ForkBranch, parent: Entry) -> Sequence:
        where = f"branches[{index}]"
        source = parent.sequence
        length = len(source.tokens)
        position = length if branch.position is None else branch.position
        if not 1 <= position <= length:
            raise InvalidArgument(
                f"{where}.position",
                f"must be from 1 to the parent's {length} tokens, not {position}",
            )
        if branch.params.n != 1:
            raise InvalidArgument(f"{where}.sampling.n", "must be 1: repeat the branch instead")
        if branch.params.prompt_logprobs is not None:
            raise InvalidArgument(
                f"{where}.sampling.prompt_logprobs", "is not for forks: use Score"
            )
        self.check_keep(f"{where}.keep_seconds", branch.keep_seconds)
        forced = self._ids(f"{where}.token_ids", branch.token_ids)
        tokens = np.concatenate([source.tokens.view()[:position], forced])
        self._check(tokens, branch.params, f"{where}.sampling")
        child = self._sequence(index, tokens, branch.params, 0, source.owner)
        child.parent_id, child.fork_position = source.id, position
        child.keep_seconds = branch.keep_seconds
        return child

    def _sequence(
        self, index: int, tokens: Tokens, params: SamplingParams, key: int, owner: Owner
    ) -> Sequence:
        tail = tokens[-_PROMPT_TAIL:].tolist()
        return Sequence(
            index=index,
            params=params,
            stop_ids=self._stop_ids(params),
            stream_key=key,
            tokens=TokenBuffer(tokens),
            detokenizer=IncrementalDetokenizer(self._tokenizer, tail, params.skip_special_tokens),
            stop=StopChecker(StopStrings(params.stop)),
            sampler_state=SamplerState(tokens) if SamplerState.needed(params) else None,
            owner=owner,
        )

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        own = frozenset(params.stop_token_ids)
        return own if params.ignore_eos else own | self._eos_ids

    def _key(self, params: SamplingParams, arrival: int) -> int:
        if params.stream_key is not None:
            return params.stream_key
        if params.seed is not None:
            return root_key(params.seed)
        if self._base_key is not None:
            return derive_key(self._base_key, arrival)
        return secrets.randbits(64)

    def _namespace_of(self, owner: Owner, arrival: int) -> bytes:
        if self._config.enable_prefix_caching:
            return self.namespace(owner)
        return namespace_key(
            model=self._fingerprint, tenant=owner.tenant, salt=owner.salt, private=arrival
        )

    # ------------------------------------------------------------ checks

    def prompt(self, field: str, token_ids: TokenIds) -> Tokens:
        """Checked ids, at least one. Raises InvalidArgument."""
        if not len(token_ids):
            raise InvalidArgument(field, "must hold at least one token")
        return self._ids(field, token_ids)

    def _ids(self, field: str, token_ids: TokenIds) -> Tokens:
        try:
            ids = np.array(token_ids)
        except ValueError:  # lists of different lengths
            ids = np.array("")
        if len(token_ids) and (ids.ndim != 1 or ids.dtype.kind not in "iu"):
            raise InvalidArgument(field, "must be whole numbers that are ids of the vocabulary")
        wrong = ids[(ids < 0) | (ids >= self._tokenizer.vocab_size)]
        if len(wrong):
            raise InvalidArgument(
                field,
                f"token id {wrong[0]} is not in the vocabulary of {self._tokenizer.vocab_size}",
            )
        return ids.astype(np.uint32)

    def _check(self, tokens: Tokens, params: SamplingParams, where: str) -> None:
        params.validate(self._tokenizer.vocab_size, where, self._config.limits)
        longest = self._max_model_len
        needs_room = params.max_tokens != 0
        if len(tokens) + needs_room > longest:
            raise InvalidArgument(
                "prompt" if where == "sampling" else where,
                f"{len(tokens)} tokens leave no room to generate: the model's length is {longest}",
            )
        if params.max_tokens is not None and len(tokens) + params.max_tokens > longest:
            raise InvalidArgument(
                f"{where}.max_tokens",
                f"{len(tokens)} prompt tokens and {params.max_tokens} more exceed the model's "
                f"length of {longest}",
            )

    def check_keep(self, field: str, seconds: float) -> None:
        """Refuse a keeping time that is not within the configured limit."""
        longest = self._config.max_keep_seconds
        if not 0 <= seconds <= longest:
            raise InvalidArgument(field, f"must be from 0 to {longest:g} seconds, not {seconds!r}")

    def _check_room(self, prompts: Seq[int], shared: Seq[int], params: Seq[SamplingParams]) -> int:
        """Refuse what can never fit in the empty pool; the most blocks that it may come to hold.

        Without max_tokens a sequence may grow to the model's length, and ends before where the pool
        is full: it is refused only where not even a first token fits.
        """
        if len(prompts) > self._config.max_num_seqs:
            raise ResourceExhausted(
                f"{len(prompts)} branches are asked for; at most max_num_seqs = "
                f"{self._config.max_num_seqs} sequences run at once"
            )
        size = self._config.block_size
        extra = [1 if p.max_tokens is None else p.max_tokens for p in params]
        needed = blocks_at_most(prompts, shared, extra, size)
        what = f"{len(prompts)} x (up to {max(prompts)} prompt + {max(extra)} new tokens)"
        check_fits(needed, self._num_blocks, size, what)
        longest = self._max_model_len
        grown = [
            longest - length if p.max_tokens is None else p.max_tokens
            for length, p in zip(prompts, params, strict=True)
        ]
        return min(blocks_at_most(prompts, shared, grown, size), self._num_blocks)


def _owner(command: Generate | Fork | Score) -> Owner:
    return Owner(command.tenant, command.cache_salt)
