"""The commands, one file each; installed, they are the package `rlvla.cli` and the programs `rlvla-<command>`."""
