"""Policy folders in LeRobot's layout, without the `lerobot` package: files, features, statistics, cameras, images."""
