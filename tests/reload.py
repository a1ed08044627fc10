"""Answer the questions of a SQuAD file with saved models, in a fresh process and with transformers alone.

    python tests/reload.py QUESTIONS.json MAX_SEQ_LENGTH DOC_STRIDE FOLDER...     prints [{question id: answer}, ...]

Nothing of train_bert_squad.py is used: AutoModel and AutoTokenizer load the folder, every window is a batch of its own,
and the best span is looked for one by one.
"""

import json
import sys

import torch
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

MAX_ANSWER_LENGTH = 30


@torch.no_grad()
def answer(model, tokenizer, question, context, max_seq_length, doc_stride):
    windows = tokenizer(question, context, truncation="only_second", max_length=max_seq_length, stride=doc_stride,
                        return_overflowing_tokens=True, return_offsets_mapping=True)  # fmt: skip
    best, text = float("-inf"), ""
    for number, offsets in enumerate(windows["offset_mapping"]):
        inputs = {name: torch.tensor([windows[name][number]]) for name in ("input_ids", "token_type_ids")}
        output = model(**inputs)
        starts, ends = output.start_logits[0].tolist(), output.end_logits[0].tolist()
        context_tokens = [token for token, side in enumerate(windows.sequence_ids(number)) if side == 1]
        for start in context_tokens:
            for end in context_tokens:
                if start <= end < start + MAX_ANSWER_LENGTH and starts[start] + ends[end] > best:
                    best, text = starts[start] + ends[end], context[offsets[start][0] : offsets[end][1]]
    return text


def main(file, max_seq_length, doc_stride, *folders):
    found = []
    for folder in folders:
        model, tokenizer = AutoModelForQuestionAnswering.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        model.eval()
        found.append({
            qa["id"]: answer(model, tokenizer, qa["question"], part["context"], int(max_seq_length), int(doc_stride))
            for article in json.load(open(file))["data"] for part in article["paragraphs"] for qa in part["qas"]
        })  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
