"""What a caller may ask of a generation. Owns validation; knows no engine state."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from prefixcache.errors import InvalidArgument
from prefixcache.limits import DEFAULTS, Limits, flag

MIN_TEMPERATURE = 1e-3
UINT64_MAX = 2**64 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw tokens. Names and ranges are those of vLLM where the meaning is the same.

    Where an upper end is one of `Limits`, its default is told.

    n: samples behind one prompt, 1 to 256. They share its prefill and its KV blocks.
    temperature: 0 (greedy) to 100; below 0.001 it is treated as 0.
    top_k: keep the k most probable tokens; 0 or -1 keeps all.
    top_p: keep the smallest set with at least this probability, in (0, 1].
    min_p: drop tokens below min_p times the most probable one, in [0, 1].
    repetition_penalty: divides positive and multiplies negative logits of tokens in prompt and
        output (CTRL, arXiv:1909.05858), in (0, 100].
    presence_penalty, frequency_penalty: subtracted from logits of output tokens, in [-2, 2].
    logit_bias: token id to a value in [-100, 100] added to its logit; at most 1,024 entries.
    seed: any unsigned 64-bit number. The same seed gives the same samples, in order; so do the
        branches of a Fork, each by its index in the call.
    stream_key: the key of a sequence's random stream as a server returned it; excludes `seed`.
    max_tokens: tokens to generate; None means until the model's length. 0 samples nothing.
    min_tokens: no end before so many tokens: end and stop tokens are masked, and stop strings
        do not match text that ends earlier.
    stop: strings that end the output, not included in it.
    stop_token_ids: tokens that end the output, besides the model's own end tokens.
    ignore_eos: do not stop at the model's end tokens.
    logprobs: return the chosen token's and this many top logprobs (0 to 64), of the model's own
        distribution: before penalties, bias and temperature.
    prompt_logprobs: the same for prompt tokens; such a prompt is computed anew, not looked up.
    skip_special_tokens: leave special tokens out of the text.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stream_key: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    @property
    def greedy(self) -> bool:
        """True where the most probable token is taken and no random number is drawn."""
        return self.temperature < MIN_TEMPERATURE

    def validate(self, vocab_size: int, where: str = "sampling", limits: Limits = DEFAULTS) -> None:
        """Raise InvalidArgument naming `where.field` for the first value out of range."""
        check = _Checker(where, limits)
        check.limited("n", self.n, 1)
        check.number("temperature", self.temperature, 0.0, 100.0)
        check.integer("top_k", self.top_k, -1, 2**31 - 1)
        check.number("top_p", self.top_p, 0.0, 1.0, above_low=True)
        check.number("min_p", self.min_p, 0.0, 1.0)
        check.number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, above_low=True)
        check.number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check.number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check.length("logit_bias", len(self.logit_bias))
        for token, bias in self.logit_bias.items():
            check.integer("logit_bias", token, 0, vocab_size - 1)
            check.number("logit_bias", bias, -100.0, 100.0)
        if self.seed is not None:
            check.integer("seed", self.seed, 0, UINT64_MAX)
        if self.stream_key is not None:
            check.integer("stream_key", self.stream_key, 0, UINT64_MAX)
            check.require("stream_key", self.seed is None, "give either seed or stream_key")
        if self.max_tokens is not None:
            check.integer("max_tokens", self.max_tokens, 0, 2**31 - 1)
        longest = 2**31 - 1 if self.max_tokens is None else self.max_tokens
        check.integer("min_tokens", self.min_tokens, 0, longest)
        check.require("stop", not isinstance(self.stop, str), "must be a list of strings")
        check.length("stop", len(self.stop))
        for text in self.stop:
            check.require("stop", text != "", "a stop string must not be empty")
            check.length("stop", len(text), "characters", limit="stop_chars")
            check.require("stop", _is_unicode(text), "holds a lone surrogate")
        check.length("stop_token_ids", len(self.stop_token_ids))
        for token in self.stop_token_ids:
            check.integer("stop_token_ids", token, 0, vocab_size - 1)
        if self.logprobs is not None:
            check.limited("logprobs", self.logprobs, 0)
        if self.prompt_logprobs is not None:
            check.limited("prompt_logprobs", self.prompt_logprobs, 0, limit="logprobs")
        if self.max_tokens == 0:
            check.require("n", self.n == 1, "with max_tokens = 0 nothing is sampled; n must be 1")


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """How to search. Names and semantics are those of Hugging Face's `generate`.

    num_beams: width, 1 to 256.
    num_return_sequences: best hypotheses to return, 1 to num_beams.
    max_tokens: longest hypothesis, at least 1.
    min_tokens: no hypothesis ends before so many tokens.
    length_penalty: a finished score is the sum of logprobs / length ** length_penalty; the length
        is that of the generated tokens. In [-10, 10].
    early_stopping: True stops at num_beams finished hypotheses; False when the best running beam
        cannot beat the worst of them at the present length; "never" when it cannot at any length.
    stop, stop_token_ids, ignore_eos: what ends a hypothesis, each by itself.
    repetition_penalty, logit_bias: applied to the log-probabilities inside the search.
    num_beam_groups: split the beams into groups of equal size that are searched one after another
        (diverse beam search, arXiv:1610.02424); 1 to num_beams, a divisor of it.
    diversity_penalty: taken from a token's log-probability for each beam of an earlier group that
        has chosen it in the same step, in [0, 100]; above 0 where there are groups.
    """

    num_beams: int
    num_return_sequences: int = 1
    max_tokens: int = 16
    min_tokens: int = 0
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    num_beam_groups: int = 1
    diversity_penalty: float = 0.0
    skip_special_tokens: bool = True

    @property
    def group_size(self) -> int:
        """Beams of a group."""
        return self.num_beams // self.num_beam_groups

    def validate(
        self, vocab_size: int, where: str = "beam_search", limits: Limits = DEFAULTS
    ) -> None:
        """Raise InvalidArgument naming `where.field` for the first value out of range."""
        check = _Checker(where, limits)
        check.limited("num_beams", self.num_beams, 1)
        check.integer("num_return_sequences", self.num_return_sequences, 1, self.num_beams)
        check.integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        check.number("length_penalty", self.length_penalty, -10.0, 10.0)
        check.integer("num_beam_groups", self.num_beam_groups, 1, self.num_beams)
        check.require(
            "num_beam_groups",
            self.num_beams % self.num_beam_groups == 0,
            f"{self.num_beams} beams do not divide into {self.num_beam_groups} equal groups",
        )
        check.number("diversity_penalty", self.diversity_penalty, 0.0, 100.0)
        check.require(
            "diversity_penalty",
            (self.diversity_penalty > 0) == (self.num_beam_groups > 1),
            "goes with num_beam_groups above 1, and only with it: else all groups find the same",
        )
        allowed = isinstance(self.early_stopping, bool) or self.early_stopping == "never"
        check.require("early_stopping", allowed, 'must be true, false or "never"')
        self.as_sampling().validate(vocab_size, where, limits)

    def as_sampling(self) -> SamplingParams:
        """What each beam has in common with a greedy sample: limits, stops, penalties."""
        return SamplingParams(
            temperature=0.0,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            skip_special_tokens=self.skip_special_tokens,
        )


class _Checker:
    """Range checks that name the field; NaN fails each of them.

    limit: of the table, where it has another name than the field.
    """

    def __init__(self, where: str, limits: Limits) -> None:
        self._where = where
        self._limits = limits

    def require(self, name: str, ok: bool, message: str) -> None:
        if not ok:
            raise InvalidArgument(f"{self._where}.{name}", message)

    def integer(self, name: str, value: int, low: int, high: int) -> None:
        ok = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
        self.require(name, ok, f"must be a whole number from {low} to {high}, not {value!r}")

    def limited(self, name: str, value: int, low: int, *, limit: str = "") -> None:
        most: int = getattr(self._limits, limit or name)
        ok = isinstance(value, int) and not isinstance(value, bool) and low <= value <= most
        self.require(
            name,
            ok,
            f"must be a whole number from {low} to {most} {flag(limit or name)}, not {value!r}",
        )

    def number(
        self, name: str, value: float, low: float, high: float, *, above_low: bool = False
    ) -> None:
        # Compared, not converted: NaN fails, and a whole number beyond any float does not raise.
        ok = isinstance(value, (int, float)) and low <= value <= high
        ok = ok and not (above_low and value == low)
        bracket = "(" if above_low else "["
        self.require(name, ok, f"must be a number in {bracket}{low:g}, {high:g}], not {value!r}")

    def length(self, name: str, count: int, what: str = "entries", *, limit: str = "") -> None:
        most = getattr(self._limits, limit or name)
        self.require(
            name,
            count <= most,
            f"has {count} {what}; at most {most} are allowed {flag(limit or name)}",
        )


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
