"""Fills the placeholders of a task's sentences with what lies in the scene."""

import json
import random


def generate_episode_descriptions(task_name, episodes, max_descriptions=1000000):
    with open(f"description/task_instruction/{task_name}.json", encoding="utf-8") as file:
        sentences = json.load(file)
    described = []
    for info in episodes:
        filled = {kind: [s.replace("{A}", info["{A}"]) for s in sentences[kind]] for kind in ("seen", "unseen")}
        for kind in filled:
            random.shuffle(filled[kind])
        described.append({kind: filled[kind][:max_descriptions] for kind in filled})
    return described
