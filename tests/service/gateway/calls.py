"""Requests as a gateway sends them, and what becomes of the answers."""

from collections import defaultdict
from dataclasses import dataclass, field

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

PROMPT = list(range(10, 40))
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def request(ids=tuple(PROMPT), *, stream=False, request_id="", **params):
    """A GenerateRequest; of `params` what the wire calls so."""
    return vllm.GenerateRequest(
        request_id=request_id,
        tokenized=vllm.TokenizedInput(input_ids=ids),
        sampling_params=vllm.SamplingParams(**params),
        stream=stream,
    )


@dataclass
class Answer:
    """All that came of one call, by index."""

    deltas: defaultdict = field(default_factory=lambda: defaultdict(list))
    completes: dict = field(default_factory=dict)

    def tokens(self, index=0):
        return tuple(token for chunk in self.deltas[index] for token in chunk.token_ids)


def generate(stub, *arguments, **named):
    """Make a call and collect; no chunk comes behind its index's complete, and each has one."""
    answer = Answer()
    for response in stub.Generate(request(*arguments, **named)):
        kind = response.WhichOneof("response")
        message = getattr(response, kind)
        assert message.index not in answer.completes
        if kind == "chunk":
            answer.deltas[message.index].append(message)
        else:
            answer.completes[message.index] = message
    return answer
