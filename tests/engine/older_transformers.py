"""Diverse beam search by a transformers release that still has it; a test runs it apart.

Reads one job as JSON on stdin; prints for each case a list of (generated tokens, score), best
first.
"""

import json
import sys

import torch
import transformers


def run(
    model: transformers.PreTrainedModel, job: dict, case: list
) -> list[tuple[list[int], float]]:
    beams, groups, diversity, length_penalty, stopping = case
    prompt = job["prompt"]
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        num_beams=beams,
        num_return_sequences=beams,
        num_beam_groups=groups,
        diversity_penalty=diversity,
        length_penalty=length_penalty,
        early_stopping=stopping,
        max_new_tokens=job["max_new_tokens"],
        eos_token_id=job["eos"],
        pad_token_id=job["suppress"][0],
        suppress_tokens=job["suppress"],
        return_dict_in_generate=True,
        output_scores=True,
    )
    results = []
    for row, score in zip(out.sequences.tolist(), out.sequences_scores.tolist(), strict=True):
        tokens = [token for token in row[len(prompt) :] if token not in job["suppress"]]
        ends = [i for i, token in enumerate(tokens) if token in job["eos"]]
        results.append((tokens[: ends[0] + 1] if ends else tokens, score))
    return results


def main() -> None:
    job = json.load(sys.stdin)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        job["checkpoint"], torch_dtype=torch.float32
    ).eval()
    print(json.dumps([run(model, job, case) for case in job["cases"]]))


if __name__ == "__main__":
    main()
