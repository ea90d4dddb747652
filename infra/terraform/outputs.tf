output "store" {
  description = "BOOKWHEEL_STORE"
  value       = "s3://${aws_s3_bucket.library.id}/${var.prefix}"
}

output "reader_policy_arn" {
  description = "For clients that pull and serve."
  value       = aws_iam_policy.reader.arn
}

output "publisher_policy_arn" {
  description = "For runs and Beam workers."
  value       = aws_iam_policy.publisher.arn
}

output "role_arns" {
  description = "For the annotations in infra/kubernetes/base/accounts.yaml."
  value       = { for name, role in aws_iam_role.this : name => role.arn }
}
