"""SmolVLA: a small vision-language model with a flow-matching action expert, in LeRobot's format."""
