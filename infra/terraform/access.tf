# Two roles: one to publish, one to read.

data "aws_iam_policy_document" "reader" {
  statement {
    sid       = "List"
    actions   = ["s3:ListBucket"] # also needed to tell "not found" from "forbidden"
    resources = [aws_s3_bucket.library.arn]

    condition {
      test     = "StringLike"
      variable = "s3:prefix"
      values   = [var.prefix, "${var.prefix}/*"]
    }
  }

  statement {
    sid       = "Read"
    actions   = ["s3:GetObject"]
    resources = ["${aws_s3_bucket.library.arn}/${var.prefix}/*"]
  }
}

data "aws_iam_policy_document" "publisher" {
  source_policy_documents = [data.aws_iam_policy_document.reader.json]

  statement {
    sid = "Write"
    actions = [
      "s3:PutObject",
      "s3:DeleteObject", # expire, gc, takedown; not old versions
      "s3:AbortMultipartUpload",
      "s3:ListMultipartUploadParts",
    ]
    resources = ["${aws_s3_bucket.library.arn}/${var.prefix}/*"]
  }
}

resource "aws_iam_policy" "reader" {
  name   = "${var.bucket}-reader"
  policy = data.aws_iam_policy_document.reader.json
}

resource "aws_iam_policy" "publisher" {
  name   = "${var.bucket}-publisher"
  policy = data.aws_iam_policy_document.publisher.json
}

# Roles that the service accounts of infra/kubernetes/base/accounts.yaml assume, so that no key is stored in the cluster.

locals {
  accounts = {
    reader    = "bookwheel-reader"
    publisher = "bookwheel-publisher"
  }
  roles = var.oidc_provider == null ? {} : local.accounts
}

data "aws_caller_identity" "this" {}

data "aws_iam_policy_document" "assume" {
  for_each = local.roles

  statement {
    actions = ["sts:AssumeRoleWithWebIdentity"]

    principals {
      type        = "Federated"
      identifiers = ["arn:aws:iam::${data.aws_caller_identity.this.account_id}:oidc-provider/${var.oidc_provider}"]
    }

    condition {
      test     = "StringEquals"
      variable = "${var.oidc_provider}:sub"
      values   = ["system:serviceaccount:${var.namespace}:${each.value}"]
    }

    condition {
      test     = "StringEquals"
      variable = "${var.oidc_provider}:aud"
      values   = ["sts.amazonaws.com"]
    }
  }
}

resource "aws_iam_role" "this" {
  for_each = local.roles

  name               = "${var.bucket}-${each.key}"
  assume_role_policy = data.aws_iam_policy_document.assume[each.key].json
}

resource "aws_iam_role_policy_attachment" "this" {
  for_each = local.roles

  role       = aws_iam_role.this[each.key].name
  policy_arn = { reader = aws_iam_policy.reader.arn, publisher = aws_iam_policy.publisher.arn }[each.key]
}
