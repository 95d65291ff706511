"""What all commands share: options, exits, progress, where output goes, ranks."""
