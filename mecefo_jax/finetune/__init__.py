"""Fine-tuning of trained models on sequence classification, in the format of GLUE, while nodes fail."""
