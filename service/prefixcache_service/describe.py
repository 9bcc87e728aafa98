"""What the service tells and checks of a loaded engine. Reads it, never runs it."""

from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING

from prefixcache_service.convert import Edge
from prefixcache_service.servicer import Served
from prefixcache_service.v1 import prefixcache_pb2 as pb

if TYPE_CHECKING:
    from prefixcache.engine.engine import Engine


def describe(engine: "Engine", address: str = "") -> Served:
    """Limits, model card and token bytes; takes some tenths of a second for a large vocabulary.

    address: where clients reach this very server, if it tells.
    """
    tokenizer, config, model = engine.tokenizer, engine.config, engine.model_config
    pieces = tuple(tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size))
    edge = Edge(
        tokenizer=tokenizer,
        vocab_size=tokenizer.vocab_size,
        max_model_len=engine.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_keep_seconds=config.max_keep_seconds,
        longest_token=max(map(len, pieces)),
        limits=config.limits,
    )
    info = pb.GetModelInfoResponse(
        name=engine.model_name,
        architecture=model.architecture,
        vocab_size=edge.vocab_size,
        max_model_len=edge.max_model_len,
        block_size=config.block_size,
        num_blocks=engine.num_blocks,
        max_num_seqs=edge.max_num_seqs,
        max_keep_seconds=edge.max_keep_seconds,
        enable_prefix_caching=config.enable_prefix_caching,
        eos_token_ids=model.eos_token_ids,
        version=version("prefixcache"),
        **asdict(engine.arithmetic),
        limits={
            **asdict(config.limits),
            "max_queue": config.max_queue,
            "max_leases": config.max_leases,
        },
    )
    return Served(edge=edge, info=info, pieces=pieces, address=address)
