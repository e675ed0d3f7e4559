"""A causal language model trained by the Trainer of transformers, with evaluations, as run_clm.py does."""

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Blocks(Dataset):
    def __init__(self, count):
        self.ids = (torch.randint(0, 3, (count, 17)).cumsum(1)) % 40

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def main():
    set_seed(42)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=32, n_embd=32, n_layer=2, n_head=2))
    args = TrainingArguments(
        output_dir="clm",
        max_steps=24,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=8,
        logging_steps=8,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_num_workers=1,
    )
    trainer = Trainer(model=model, args=args, train_dataset=Blocks(400), eval_dataset=Blocks(16))
    trainer.train()
    print([row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row])
    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
