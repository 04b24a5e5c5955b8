"""pi0 and pi0.5: PaliGemma with a flow-matching action expert, in LeRobot's format."""
