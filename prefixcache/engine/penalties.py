"""Penalties, biases and bans: owns the token counts of a sequence and the edits of its logits.

Works on a copy of the logits that the sampler hands over; never on the model's own.
"""

from collections.abc import Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from prefixcache.params import SamplingParams

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]

_FLOAT32_MAX = float(np.finfo(np.float32).max)


class SamplerState:
    """Distinct tokens of a sequence, and how often each was generated.

    Slots 0..n-1 of two growing arrays hold the token ids seen and their counts in the output; a
    prompt token has a count of 0 until it is generated. `append` is O(1); `copy` and `fork` are
    O(distinct tokens).
    """

    __slots__ = ("_counts", "_ids", "_slots")

    def __init__(self, prompt_token_ids: Sequence[int] | npt.NDArray[np.integer]) -> None:
        distinct = np.unique(np.asarray(prompt_token_ids, np.int64))
        self._slots = {token: slot for slot, token in enumerate(distinct.tolist())}
        self._ids = distinct
        self._counts = np.zeros(len(distinct))

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        """True where the parameters hold a penalty, so that a sequence needs a state."""
        return (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )

    @property
    def token_ids(self) -> Int64Array:
        """int64 [n]: the distinct tokens of prompt and output, in order of first sight."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> Float64Array:
        """float64 [n]: how often each of `token_ids` was generated."""
        return self._counts[: len(self._slots)]

    def append(self, token_id: int) -> None:
        """Count one generated token."""
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._ids):
            self._grow()
        self._ids[slot] = token_id
        self._counts[slot] += 1.0

    def extend(self, token_ids: Iterable[int]) -> None:
        """Count several generated tokens."""
        for token_id in token_ids:
            self.append(token_id)

    def copy(self) -> "SamplerState":
        """A state of its own with the same prompt and output, as for another sample."""
        twin = SamplerState.__new__(SamplerState)
        twin._slots = self._slots.copy()
        twin._ids = self._ids.copy()
        twin._counts = self._counts.copy()
        return twin

    def fork(self) -> "SamplerState":
        """The state of a fork at the end: everything so far is its prompt, nothing is output."""
        child = self.copy()
        child._counts[:] = 0.0
        return child

    def _grow(self) -> None:
        room = max(16, len(self._ids))
        self._ids = np.concatenate([self._ids, np.zeros(room, np.int64)])
        self._counts = np.concatenate([self._counts, np.zeros(room)])


def edit_logits(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    states: Sequence[SamplerState | None],
    banned: Sequence[Collection[int]],
) -> None:
    """Apply logit_bias, then penalties, then bans to each row, in place: transformers' order.

    Repetition (CTRL, arXiv:1909.05858) is over prompt and output; presence and frequency are over
    the output. Only the touched elements are read and written, each by itself in float64 on the
    host, so a row's bits depend neither on its neighbours nor on the device.

    logits: float32 [R, V], any device. params, states, banned: R each; a state of None means
        that no penalty applies. All token ids are below V.
    """
    elements = _Elements(logits)
    biased = [(row, param.logit_bias) for row, param in enumerate(params) if param.logit_bias]
    if biased:
        elements.select([row for row, _ in biased], [_array(bias) for _, bias in biased])
        bias = [np.fromiter(bias.values(), np.float64, len(bias)) for _, bias in biased]
        elements.write(elements.read() + np.concatenate(bias))
    seen = [(row, state) for row, state in enumerate(states) if state and len(state.token_ids)]
    if seen:
        elements.select([row for row, _ in seen], [state.token_ids for _, state in seen])
        columns = [_penalty_columns(params[row], state) for row, state in seen]
        elements.write(_penalized(elements.read(), np.concatenate(columns, axis=1)))
    barred = [(row, ids) for row, ids in enumerate(banned) if ids]
    if barred:
        elements.select([row for row, _ in barred], [_array(ids) for _, ids in barred])
        elements.fill(-np.inf)


class _Elements:
    """Some elements of a matrix [R, V], read and written at once.

    On the CPU through numpy, in this thread alone: a team of threads costs more than this work.
    """

    def __init__(self, matrix: torch.Tensor) -> None:
        self._matrix = matrix
        self._host = matrix.numpy() if matrix.device.type == "cpu" else None
        self._rows = self._ids = np.empty(0, np.int64)

    def select(self, rows: Sequence[int], ids: Sequence[Int64Array]) -> None:
        """Elements (rows[i], every id in ids[i])."""
        self._rows = np.repeat(np.asarray(rows, np.int64), [len(some) for some in ids])
        self._ids = np.concatenate(ids)

    def read(self) -> Float64Array:
        if self._host is not None:
            return self._host[self._rows, self._ids].astype(np.float64)
        return np.asarray(self._matrix[self._where()].double().cpu().numpy())

    def write(self, values: Float64Array) -> None:
        # A penalty of 1e-300 must not make an infinity (SE-07).
        floats = np.clip(values, -_FLOAT32_MAX, _FLOAT32_MAX).astype(np.float32)
        if self._host is not None:
            self._host[self._rows, self._ids] = floats
        else:
            self._matrix[self._where()] = torch.from_numpy(floats).to(self._matrix.device)

    def fill(self, value: float) -> None:
        if self._host is not None:
            self._host[self._rows, self._ids] = value
        else:
            self._matrix[self._where()] = value

    def _where(self) -> tuple[torch.Tensor, torch.Tensor]:
        device = self._matrix.device
        return torch.from_numpy(self._rows).to(device), torch.from_numpy(self._ids).to(device)


def _penalty_columns(params: SamplingParams, state: SamplerState) -> Float64Array:
    """One column a token: repetition, presence, frequency, count in the output."""
    columns = np.empty((4, len(state.token_ids)))
    columns[0] = params.repetition_penalty
    columns[1] = params.presence_penalty
    columns[2] = params.frequency_penalty
    columns[3] = state.counts
    return columns


def _penalized(values: Float64Array, columns: Float64Array) -> Float64Array:
    repetition, presence, frequency, counts = columns
    with np.errstate(over="ignore"):
        scaled: Float64Array = np.where(values > 0, values / repetition, values * repetition)
    scaled -= presence * (counts > 0)
    scaled -= frequency * counts
    return scaled


def _array(ids: Collection[int]) -> Int64Array:
    return np.fromiter(ids, np.int64, len(ids))
