"""The rollout backend `vllm`: the policy's decoder in a separate process, in an interpreter with vLLM."""
