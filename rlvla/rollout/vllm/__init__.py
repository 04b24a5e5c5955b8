"""The rollout backend `vllm`: the policy's decoder in a program of its own, in an interpreter that has vLLM."""
