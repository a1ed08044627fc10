"""Answer the questions of a SQuAD file with saved models, in a fresh process.

    python tests/reload.py QUESTIONS.json MAX_SEQ_LENGTH DOC_STRIDE FOLDER...

prints [{question id: answer}, ...]. Nothing of train_bert_squad.py is used: every window is a batch
of its own, and the best span is looked for one by one.
"""

import json
import sys

import torch
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

MAX_ANSWER_LENGTH = 30


@torch.no_grad()
def answer(model, tokenizer, question, context, max_seq_length, doc_stride):
    windows = tokenizer(
        question,
        context,
        truncation="only_second",
        max_length=max_seq_length,
        stride=doc_stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    best, text = float("-inf"), ""
    for number, offsets in enumerate(windows["offset_mapping"]):
        output = model(
            **{
                name: torch.tensor([windows[name][number]])
                for name in ("input_ids", "token_type_ids")
            }
        )
        starts, ends = output.start_logits[0].tolist(), output.end_logits[0].tolist()
        tokens = [token for token, side in enumerate(windows.sequence_ids(number)) if side == 1]
        for start in tokens:
            for end in tokens:
                score = starts[start] + ends[end]
                if start <= end < start + MAX_ANSWER_LENGTH and score > best:
                    best, text = score, context[offsets[start][0] : offsets[end][1]]
    return text


def main(file, max_seq_length, doc_stride, *folders):
    paragraphs = [
        part for article in json.load(open(file))["data"] for part in article["paragraphs"]
    ]
    sizes, found = (int(max_seq_length), int(doc_stride)), []
    for folder in folders:
        model = AutoModelForQuestionAnswering.from_pretrained(folder).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        found.append(
            {
                qa["id"]: answer(model, tokenizer, qa["question"], part["context"], *sizes)
                for part in paragraphs
                for qa in part["qas"]
            }
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
